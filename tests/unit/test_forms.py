"""Every form in the table of operations gives what plain torch gives, whatever length, dtype and threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from micro.kernels import reference, table, threads
from tests.operations import CASES, KINDS, LENGTHS, WITHOUT_REFERENCE, assert_same, vector
from tests.products import grid


@contextmanager
def many_parts(num_threads: int) -> Iterator[None]:
    """Have loops share out vectors of 1,024 elements among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    with patch.object(threads, "LEAST", 1 << 10), patch.object(reference, "SAMPLE", 512):
        yield
    torch.set_num_threads(before)


def test_every_operation_has_a_case() -> None:
    assert CASES.keys() | WITHOUT_REFERENCE == table.TABLE.keys()


@pytest.mark.skipif(not table.has_numba(), reason="numba is not installed")
@grid(operation=CASES, kind=KINDS, numel=LENGTHS, num_threads=[1, 3])
def test_numba_gives_what_torch_gives(operation: str, kind: str, numel: int, num_threads: int) -> None:
    module = table.TABLE[operation].numba
    assert module
    with many_parts(num_threads):
        for given in CASES[operation](kind, numel, torch.float32):
            assert_same(operation, table.function(module, operation), given)


@pytest.mark.skipif(not table.has_numba(), reason="numba is not installed")
@grid(dtype=[torch.bfloat16, torch.float16], num_threads=[1, 3])
def test_numba_adds_every_number_of_16_bits(dtype: torch.dtype, num_threads: int) -> None:
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    with many_parts(num_threads):
        assert_same("absorb_", table.function("absorbing", "absorb_"), (vector("normal", 2**16), grad))
