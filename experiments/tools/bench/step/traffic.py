"""Count the memory traffic of a step: bytes read and written by torch operations and compiled loops.

Compiled loops report their bytes; a torch operation reads its inputs and writes its outputs. Views move nothing, and
collectives are counted elsewhere. Reads before writes of cache lines, and data that stays in a cache between
operations, are ignored.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.tools.profile import method_steps
from micro.kernels.threads import moved_bytes

LEAST_SHARE = 0.01  # share of the vector; smaller operations are ignored
ENTRY_BYTES = 8  # bytes read and written per indexed entry, besides the index
OVERWRITING = ("aten.copy_", "aten.fill_", "aten.zero_")
MOVING_NONE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.set_", "aten.repeat")  # the last lays out messages


def of_this_rank() -> tuple[float, float]:
    """Return the bytes per element of a step on this rank, and those of its floor."""
    steps = method_steps.current
    assert steps
    grad = steps.next_gradient()
    return bytes_per_element(lambda: steps.step(grad), grad.numel()), bytes_per_element(steps.floor, grad.numel())


def bytes_per_element(work: Callable[[], object], numel: int) -> float:
    """Run ``work`` on vectors of ``numel`` in this thread; return its bytes of memory traffic per element."""
    before = moved_bytes()
    with _Bytes(LEAST_SHARE * numel) as counted:
        work()
    return (counted.bytes + moved_bytes() - before) / numel


class _Bytes(TorchDispatchMode):
    """Sums the memory traffic of torch operations."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.bytes = 0
        self._least = least

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace != "aten" or str(func).startswith(MOVING_NONE):
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        by_index = "index" in str(func)
        if by_index:  # it moves the indexed elements, or a whole mask
            tensors = [tensor for tensor in tensors if not tensor.is_floating_point()]
        longest = max((tensor.numel() for tensor in tensors), default=0)
        if longest >= self._least:
            self.bytes += longest * ENTRY_BYTES + _size(tensors) if by_index else _moved(func, args, kwargs, result)
        return result


def _moved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any) -> int:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs or {})
    changed = [given.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    is_overwriting = ".out" in str(func) or str(func).startswith(OVERWRITING)
    read = [leaf for leaf in tree_leaves(given) if not (is_overwriting and any(leaf is each for each in changed))]
    return _size(read) + _size(tree_leaves(changed or result))


def _size(leaves: Sequence[Any]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
