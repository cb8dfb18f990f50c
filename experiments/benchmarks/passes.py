"""How often a step goes over a vector, and the bytes that it moves: what torch's operations and compiled loops visit.

An operation visits as many elements as the longest tensor has that it takes or gives, one by index as many as there are
indices. Views visit none, and what collectives move counts as exchange elsewhere. One pass may read and write several
vectors.

The bytes are those read from memory and written to it. Compiled loops say how many they move; an operation of torch
reads what it takes and writes what it gives or changes. That a processor reads a line before it writes to it is not
counted, nor is what stays in a cache from one operation to the next.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from micro.kernels.threads import moved_bytes, visited

LEAST_SHARE = 0.01  # of a vector: operations on less are no pass over it, and are left out
ENTRY_BYTES = 8  # of an entry by index, that are read and written beside the index
OVERWRITING = ("aten.copy_", "aten.fill_", "aten.zero_")


class Visits(NamedTuple):
    """How often a step goes over a vector, and bytes that it moves for each element."""

    passes: float
    bytes_per_element: float


class _Visits(TorchDispatchMode):
    """Adds up what torch's operations visit."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.elements, self.bytes = 0, 0
        self._least = least

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace == "aten":
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            by_index = "index" in str(func)
            if by_index:  # it visits what the indices name, or a whole mask
                tensors = [tensor for tensor in tensors if not tensor.is_floating_point()]
            longest = max((tensor.numel() for tensor in tensors), default=0)
            if longest >= self._least and _touches(func):
                self.elements += longest
                self.bytes += longest * ENTRY_BYTES + _size(tensors) if by_index else _moved(func, args, kwargs, result)
        return result


def _touches(func: Any) -> bool:
    """Tell whether an operation reads or writes elements: to make an empty vector does neither.

    `repeat` lays out what a collective sends.
    """
    return not str(func).startswith(("aten.empty", "aten.new_empty", "aten.detach", "aten.set_", "aten.repeat"))


def _moved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs or {})
    changed = [given.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    is_overwriting = ".out" in str(func) or str(func).startswith(OVERWRITING)
    read = [leaf for leaf in tree_leaves(given) if not (is_overwriting and any(leaf is each for each in changed))]
    return _size(read) + _size(tree_leaves(changed or result))


def _size(leaves: Sequence[Any]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


def count_passes(step: Callable[[], object], numel: int) -> Visits:
    """Run ``step`` in this thread; return how often it goes over a vector of ``numel``, and what it moves."""
    before, moved_before = visited(), moved_bytes()
    with _Visits(LEAST_SHARE * numel) as visits:
        step()
    moved = visits.bytes + moved_bytes() - moved_before
    return Visits((visits.elements + visited() - before) / numel, moved / numel)
