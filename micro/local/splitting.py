"""Split a model into fragments that are exchanged at different steps."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from micro.values.flat import real
from micro.values.names import as_patterns, check_matched, listed, matches

Fragments = int | Sequence[str | Sequence[str]]
"""A number of fragments of about equal size, or for each fragment patterns of parameter names."""


def check_streaming(fragments: Fragments, delay: int, mix: float, every: int) -> None:
    """Raise ValueError for a value out of its range."""
    if not isinstance(fragments, int | list | tuple) or isinstance(fragments, bool):
        raise ValueError(f"fragments must be a number, or patterns of names for each fragment, got {fragments!r}")
    number = fragments if isinstance(fragments, int) else len(fragments)
    if not 1 <= number <= every:
        raise ValueError(f"fragments must be in [1, every={every}], one per step, got {number}")
    if not isinstance(delay, int) or isinstance(delay, bool) or not 0 <= delay < every:
        raise ValueError(f"delay must be a number of steps in [0, every={every}), got {delay!r}")
    if not isinstance(mix, int | float) or isinstance(mix, bool) or not 0 < mix <= 1:
        raise ValueError(f"mix must be in (0, 1], got {mix!r}")


def split(parameters: Mapping[str, Tensor], fragments: Fragments) -> list[dict[str, Tensor]]:
    """Return the parameters of each fragment, by name in the model's order.

    Raises:
        ValueError: fewer parameters than fragments, a pattern without a match, a parameter in two fragments or in none.
    """
    if isinstance(fragments, int):
        return _split_evenly(parameters, fragments)
    patterns = [as_patterns(each, "fragments") for each in fragments]
    for each in patterns:
        check_matched(each, list(parameters), "fragments")
    for name in parameters:
        holders = [number for number, each in enumerate(patterns) if matches(each, name)]
        if len(holders) > 1:
            raise ValueError(f"fragments overlap: '{name}' is in fragments {holders[0]} and {holders[1]}, from 0")
    left = [name for name in parameters if not any(matches(each, name) for each in patterns)]
    if left:
        raise ValueError(f"fragments leave out {listed(left)}: give each trained parameter a fragment")
    return [{name: p for name, p in parameters.items() if matches(each, name)} for each in patterns]


def _split_evenly(parameters: Mapping[str, Tensor], number: int) -> list[dict[str, Tensor]]:
    """Assign parameters, largest first, each to the smallest fragment so far."""
    if number > len(parameters):
        raise ValueError(f"fragments must be at most the {len(parameters)} trained parameters, got {number}")
    sizes = {name: real(p.detach()).numel() for name, p in parameters.items()}
    filled, holder = [0] * number, dict[str, int]()
    for name in sorted(parameters, key=lambda name: -sizes[name]):
        least = min(range(number), key=lambda fragment: (filled[fragment], fragment))
        filled[least] += max(sizes[name], 1)
        holder[name] = least
    return [{name: p for name, p in parameters.items() if holder[name] == each} for each in range(number)]
