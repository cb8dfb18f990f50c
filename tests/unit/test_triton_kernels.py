"""Triton's kernels, run by its interpreter on the CPU, equal the reference, and are chosen where they can be."""

from collections.abc import Callable, Iterator
from importlib.metadata import version
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.interpreted import serving_the_cpu  # isort: skip  # before what imports triton

import micro
from micro import kernels
from micro.kernels import preparing, reference, sampling
from micro.kernels.triton import absorbing, checking
from tests.operations import CASES, KINDS, assert_same, vector
from tests.products import grid

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy, of the interpreter

LENGTHS = [0, 1, 17, 1024, 2077]  # around the 1,024 elements of a program
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
of_new_triton = pytest.mark.skipif(
    tuple(map(int, version("triton").split(".")[:2])) < (3, 7), reason="Triton's interpreter takes no numpy 2.4"
)
OPERATIONS = [operation for operation, forms in kernels.TABLE.items() if forms.triton]


@pytest.fixture(autouse=True)
def interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton know what it is used for: it imports more of itself when it first runs a kernel."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@grid(operation=OPERATIONS, kind=KINDS, numel=LENGTHS, dtype=DTYPES)
def test_triton_gives_what_torch_gives(
    operation: str, kind: str, numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "small" and dtype is torch.bfloat16:
        return  # Triton's interpreter reads a bfloat16 without a leading digit as zero
    monkeypatch.setattr(sampling, "SAMPLE", 500)
    for given in CASES[operation](kind, numel, dtype):
        assert_same(operation, getattr(kernels.module(kernels.TABLE[operation].triton or ""), operation), given)


@pytest.fixture
def cpu_as_gpu() -> Iterator[None]:
    """Let the kernels serve tensors of the CPU."""
    with serving_the_cpu():
        yield


class Flat(Tensor):
    pass


@pytest.mark.usefixtures("cpu_as_gpu")
def test_what_the_kernels_do_not_take_the_reference_does() -> None:
    x = vector("normal", 100)
    assert not any(kernels.on_gpu(other) for other in (x[::2], x.to(torch.float8_e5m2), x.as_subclass(Flat)))
    assert kernels.above(x[::2], 1.0)[0].tolist() == reference.above(x[::2], 1.0)[0].tolist()


@pytest.mark.usefixtures("cpu_as_gpu")
def test_a_device_is_checked_before_the_first_step_and_named_once_where_no_kernel_runs() -> None:
    """It is served by torch then."""
    x, reducer = torch.ones(5, dtype=torch.float64), micro.SparseReducer(micro.TopK(), 0.1)
    fails = patch.object(checking, "check", side_effect=RuntimeError("no C compiler"))
    with fails, pytest.warns(UserWarning, match="on cpu.*no C compiler") as heard:
        found = [kernels.above(x, 0.5)[0].tolist() for _ in range(2)]
    assert (found, len(heard)) == ([[0, 1, 2, 3, 4]] * 2, 1)
    kernels._runs.cache_clear()
    preparing.prepare.cache_clear()
    with patch.object(checking, "check") as check:
        micro.Simulation(reducer, micro.Layout.flat(50), 1)
    check.assert_called_once_with(torch.device("cpu"))
    preparing.prepare.cache_clear()


@of_new_triton
def test_a_device_is_checked_before_its_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "NUMEL", 5_001)
    checking.check(torch.device("cpu"))
    wrong: dict[str, Callable[..., object]] = {
        "absorbing.absorb_": lambda residual, grad: None,
        "scanning.above": lambda x, threshold: reference.above(x, 1.01 * threshold),
        "scanning.largest": lambda x, k: reference.largest(x, k + 1),
        "summing.sums": lambda x, floor: reference.sums(x, 1.01 * floor),
        "summing.absorb_and_sum_": lambda residual, grad: (absorbing.absorb_(residual, grad), [0.0] * 6),
    }
    for name, function in wrong.items():
        function.__name__ = name.split(".")[1]
        with monkeypatch.context() as patches:
            patches.setattr(f"{checking.__name__}.{name}", function)
            with pytest.raises(RuntimeError, match="gives another result than torch"):
                checking.check(torch.device("cpu"))
