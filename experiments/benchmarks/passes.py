"""How often a step goes over a vector: elements that torch's operations and compiled loops visit, by its length.

An operation visits as many elements as the longest tensor has that it takes or gives, one by index as many as there are
indices. Views visit none, and what collectives move counts as exchange elsewhere. One pass may read and write several
vectors.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from micro.kernels.threads import visited

LEAST_SHARE = 0.01  # of a vector: operations on less are no pass over it, and are left out


class _Visits(TorchDispatchMode):
    """Adds up what torch's operations visit."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.elements = 0
        self._least = least

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace == "aten":
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            if "index" in str(func):  # it visits what the indices name, or a whole mask
                tensors = [tensor for tensor in tensors if not tensor.is_floating_point()]
            longest = max((tensor.numel() for tensor in tensors), default=0)
            self.elements += longest if longest >= self._least and _touches(func) else 0
        return result


def _touches(func: Any) -> bool:
    """Tell whether an operation reads or writes elements: to make an empty vector does neither."""
    return not str(func).startswith(("aten.empty", "aten.new_empty", "aten.detach", "aten.set_"))


def count_passes(step: Callable[[], object], numel: int) -> float:
    """Run ``step`` in this thread; return how often it goes over a vector of ``numel``."""
    before = visited()
    with _Visits(LEAST_SHARE * numel) as visits:
        step()
    return (visits.elements + visited() - before) / numel
