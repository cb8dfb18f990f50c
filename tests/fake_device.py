"""A CUDA device for tests that have none: tensors with values on the CPU that say they are on ``cuda:0``.

PyTorch's own fake tensors have no values, so a method whose next message is as long as the last counts say cannot take
a step with them. These have: every operation runs on the CPU, under the rules of a device. An operation on tensors of
two devices is an error, a division by a number is a product with its inverse, and whatever makes the host wait for the
device is counted by where `micro` calls it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import micro

DEVICE = torch.device("cuda", 0)
Way = Literal["read", "write"]
"""What the host waits for: a number or a size that it needs, or its own memory that the device copies."""

_HOST = torch.device("cpu")
_MICRO = f"{Path(micro.__file__).parent}/"
_aten = torch.ops.aten
_without_modes = torch._C._DisableTorchDispatch  # type: ignore[attr-defined]
_COPIES = (_aten.copy_.default, _aten._to_copy.default)  # the operations that may mix devices
_INDEXED = (_aten.index.Tensor, _aten.index_put_.default)
_DIVISIONS = {
    _aten.div.Tensor: _aten.mul.Tensor,
    _aten.div_.Tensor: _aten.mul_.Tensor,
}  # division by a number multiplies by its inverse
_READS = {  # how often these wait on CUDA; lengths that depend on the data are read too
    _aten._local_scalar_dense.default: 1,
    _aten.equal.default: 1,
    _aten.nonzero.default: 1,
    _aten.masked_select.default: 1,
    _aten._unique2.default: 1,
    _aten.unique_dim.default: 1,
    _aten.unique_consecutive.default: 1,
    _aten.bincount.default: 2,  # the smallest and the largest
}


class DeviceTensor(Tensor):
    """A tensor of the device. Operations on it run inside of `fake_device` alone.

    Args:
        values: on the CPU; memory is shared with it.
    """

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "DeviceTensor":
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        made: DeviceTensor = Tensor._make_wrapper_subclass(cls, values.size(), device=DEVICE, **layout)
        made.values = values
        return made

    def tolist(self) -> Any:
        """Return the values as numbers."""
        return self.cpu().tolist()

    def __repr__(self, **_: object) -> str:
        return f"DeviceTensor({self.values})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of the fake device: call it inside of fake_device()")


class Waits(TorchDispatchMode):
    """Runs a thread's operations under the rules of a device, and counts where the host waits for it.

    Attributes:
        seen: number of waits, by way and by function of micro.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[Way, str]] = Counter()
        self._pinned: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on the values; tensors that it makes are of the device that it names or ran on."""
        kwargs = dict(kwargs or {})
        with _without_modes():
            tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
            on_device = any(isinstance(x, DeviceTensor) for x in tensors)
            if on_device and func not in _COPIES:
                _refuse_mixed(func, tensors)
            target = kwargs.get("device")
            makes_own = on_device if target is None else torch.device(target).type == "cuda"
            self._count(func, args, kwargs, on_device, makes_own)
            if target is not None:
                kwargs["device"] = _HOST
            is_pinned = kwargs.pop("pin_memory", None)  # pinning needs a driver
            if on_device and func in _DIVISIONS and not isinstance(args[1], Tensor) and args[0].is_floating_point():
                func, args = _DIVISIONS[func], (args[0], 1 / torch.tensor(args[1], dtype=args[0].dtype).item())
            out = func(*_mapped(_values_of, args), **_mapped(_values_of, kwargs))
            if is_pinned:
                self._pinned.add(out.data_ptr())
            return _mapped(_on_device, out) if makes_own else out

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], on_device: bool, makes_own: bool) -> None:
        way: Way = "read"
        number = _READS.get(func, 0) if on_device else 0
        if func in _COPIES:
            source, target = (args[1], args[0]) if func is _aten.copy_.default else (args[0], None)
            goes_to_device = makes_own if target is None else isinstance(target, DeviceTensor)
            way = "write" if goes_to_device else "read"
            own = source if goes_to_device else target  # not pinned, it may be read after it is freed: count that too
            is_pinned = isinstance(own, Tensor) and own.data_ptr() in self._pinned
            non_blocking = kwargs.get("non_blocking") or (func is _aten.copy_.default and any(args[2:]))
            waits = not (is_pinned and non_blocking)
            number = int(isinstance(source, DeviceTensor) != goes_to_device and waits)
        elif func is _aten.repeat_interleave.Tensor:
            number = int(on_device and kwargs.get("output_size") is None)
        elif func in _INDEXED and on_device:
            number = _masks(func, args)
        if number:
            self.seen[way, _place()] += number


def _masks(func: Any, args: Any) -> int:
    """Return how many masks an indexing turns into places; a number is written through a mask without that."""
    if func is _aten.index_put_.default and not isinstance(args[2], DeviceTensor):
        return 0
    return sum(x is not None and x.dtype == torch.bool for x in args[1])


def _refuse_mixed(func: Any, tensors: list[Tensor]) -> None:
    """Raise RuntimeError if an operation mixes device tensors with a host tensor of more than one number."""
    if any(x.dim() and not isinstance(x, DeviceTensor) for x in tensors):
        raise RuntimeError(f"{func} got tensors of the device and of the host, in {_place()}")


def _place() -> str:
    """Return the name of the innermost function of micro that is at work."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(_MICRO):
        frame = frame.f_back
    return frame.f_code.co_qualname.split(".<locals>")[0]


def _leaves(x: Any) -> Iterator[Any]:
    """Yield what is in nested lists, tuples and dictionaries; torch's own pytrees take ten times as long."""
    if isinstance(x, (list, tuple)):
        for item in x:
            yield from _leaves(item)
    elif isinstance(x, dict):
        yield from _leaves(list(x.values()))
    else:
        yield x


def _mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """Return nested lists, tuples and dictionaries with each leaf changed."""
    if isinstance(x, (list, tuple)):
        return type(x)([_mapped(change, item) for item in x]) if type(x) in (list, tuple) else x
    if isinstance(x, dict):
        return {key: _mapped(change, value) for key, value in x.items()}
    return change(x)


def _values_of(x: Any) -> Any:
    return x.values if isinstance(x, DeviceTensor) else x


def _on_device(x: Any) -> Any:
    return DeviceTensor(x) if isinstance(x, Tensor) else x


@contextmanager
def fake_device() -> Iterator[Waits]:
    """Have this thread's operations on `DEVICE` run on the CPU; yields what counts the host's waits."""
    with FakeTensorMode(), Waits() as waits:  # where the first is on, PyTorch looks for no driver
        yield waits
