"""Numbers and switches that a user gives as a setting, checked against the type that the setting declares."""

import math
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

LARGEST = 2**31 - 1  # of a whole number: counts, lengths and numbers of bits


def check_scalar(what: str, declared: Any, given: object) -> None:
    """Raise ValueError unless a value is of the type that its setting declares.

    Whole numbers, numbers, switches and choices among words are checked, each also where it may be None; what another
    type allows is checked by the part itself.

    Args:
        what: the setting, for the message.
        declared: the annotation of the setting, such as ``int`` or ``float | None``.
    """
    kinds = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    if given is None and type(None) in kinds:
        return
    kind = next((kind for kind in kinds if kind is not type(None)), declared)
    allowed = _allowed(kind, given)
    if allowed:
        none = " or null" if type(None) in kinds else ""
        raise ValueError(f"{what} must be {allowed}{none}, got {given!r}")


def _allowed(kind: Any, given: object) -> str | None:
    """Return what a setting allows where ``given`` is not that, else None."""
    if kind is bool:
        return None if isinstance(given, bool) else "true or false"
    if kind is int:
        if isinstance(given, bool) or not isinstance(given, Integral):
            return "a whole number"
        return None if abs(int(given)) <= LARGEST else f"at most {LARGEST}"
    if kind is float:
        is_number = isinstance(given, Real) and not isinstance(given, bool)
        return None if is_number and math.isfinite(_as_float(given)) else "a finite number"
    if get_origin(kind) is Literal:
        words = get_args(kind)
        return None if isinstance(given, str) and given in words else f"one of {', '.join(words)}"
    return None


def _as_float(given: Any) -> float:
    try:
        return float(given)
    except OverflowError:
        return math.inf
