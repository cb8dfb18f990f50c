"""Check a user's numbers and booleans against the declared type of a setting."""

import math
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

LARGEST = 2**31 - 1  # of a whole number: counts, lengths and numbers of bits


def check_scalar(what: str, declared: Any, given: Any) -> None:
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
    is_switch = isinstance(given, bool)
    allowed, fits = "", True
    if kind is bool:
        allowed, fits = "true or false", is_switch
    elif kind is int and isinstance(given, Integral) and not is_switch:
        allowed, fits = f"at most {LARGEST}", abs(int(given)) <= LARGEST
    elif kind is int:
        allowed, fits = "a whole number", False
    elif kind is float:
        allowed, fits = "a finite number", isinstance(given, Real) and not is_switch and _is_finite(given)
    elif get_origin(kind) is Literal:
        words = get_args(kind)
        allowed, fits = f"one of {', '.join(words)}", isinstance(given, str) and given in words
    if not fits:
        raise ValueError(f"{what} must be {allowed}{' or null' if type(None) in kinds else ''}, got {given!r}")


def _is_finite(given: Real) -> bool:
    try:
        return math.isfinite(given)
    except OverflowError:
        return False
