"""Triton's kernels against the reference: on a GPU, or in Triton's interpreter where TRITON_INTERPRET is set."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from experiments.benchmarks import code_checks
from micro.kernels import candidates, reference
from micro.kernels.candidates import Candidates
from micro.randomness import generator

LENGTHS = (0, 1, 17, 5003)
CODED_LENGTHS = (1, 4200)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ONE_HALF = 0x3F000000  # as bits of a float32
Pairs = list[tuple[Tensor, Tensor]]  # what the kernel gives, and what the reference gives


@dataclass(frozen=True, slots=True)
class Outcome:
    """How often a kernel was compared with the reference, and the first case in which it differs ("": none)."""

    kernel: str
    cases: int
    problem: str


def outcomes(device: torch.device) -> Iterator[Outcome]:
    """Compare every kernel with the reference, bit for bit but for sums, over lengths and dtypes."""
    for name, pairs in CHECKS.items():
        cases = [(numel, dtype) for numel in LENGTHS for dtype in DTYPES]
        problems = [problem for case in cases if (problem := _problem(pairs, *case, device))]
        yield Outcome(name, len(cases), problems[0] if problems else "")
    for name in code_checks.CODECS:
        lengths = [(name, numel, device) for numel in CODED_LENGTHS]
        problems = [problem for length in lengths if (problem := _problem(code_checks.pairs, *length))]
        yield Outcome(name, len(lengths), problems[0] if problems else "")


def _problem(pairs: Callable[..., Pairs], *case: object) -> str:
    try:
        equal = all(_same(found, expected) for found, expected in pairs(*case))
    except Exception as error:  # the report names it, whatever it is
        return f"{case[:2]}: {type(error).__name__}: {error}"
    return "" if equal else f"{case[:2]}: differs"


def _same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


def _vector(numel: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    return torch.randn(numel, generator=generator(seed, numel)).to(dtype).to(device)


def _gradients(numel: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return a residual and a gradient with NaN and Inf, and a copy of both."""
    residual = _vector(numel, torch.promote_types(dtype, torch.float32), device, 0)
    grad = _vector(numel, dtype, device, 1)
    grad[numel // 2 :: 97], grad[numel // 3 :: 89] = math.nan, -math.inf
    return [residual, grad, residual.clone(), grad.clone()]


def _absorb(numel: int, dtype: torch.dtype, device: torch.device) -> Pairs:
    from micro.kernels import triton

    residual, grad, expected, source = _gradients(numel, dtype, device)
    found = [triton.absorb_(residual, grad), reference.absorb_(expected, source)]
    first, second = (torch.tensor(-1 if index is None else index) for index in found)
    return [(first, second), (residual, expected), (grad, source)]


def _collect(numel: int, dtype: torch.dtype, device: torch.device) -> Pairs:
    from micro.kernels import triton

    residual, grad, expected, source = _gradients(numel, dtype, device)
    plan = candidates.plan(numel // 5, numel - numel // 7, ONE_HALF, 18, device)
    found, wanted = (Candidates.empty(numel + 3, residual) for _ in range(2))
    triton.absorb_and_collect_(residual, grad, plan, found)
    candidates.absorb_and_collect_(expected, source, plan, wanted)
    names = Candidates.__slots__
    return [(residual, expected), (grad, source), *((getattr(found, each), getattr(wanted, each)) for each in names)]


def _above(numel: int, dtype: torch.dtype, device: torch.device) -> Pairs:
    from micro.kernels import triton

    x = _vector(numel, dtype, device, 0)
    x[::7], x[3::29], x[5::31] = 0.0, math.nan, -math.inf
    return [
        pair
        for threshold in (0.0, 1.5, math.inf)
        for pair in zip(triton.above(x, threshold), reference.above(x, threshold), strict=True)
    ]


def _counts(numel: int, dtype: torch.dtype, device: torch.device) -> Pairs:
    from micro.kernels import triton

    x = _vector(numel, dtype, device, 0)
    ranges = ((0, 20, 2040), (ONE_HALF, 18, 32), (1, 26, 4))
    return [(triton.magnitude_counts(x, *each), reference.magnitude_counts(x, *each)) for each in ranges]


def _scatter(numel: int, dtype: torch.dtype, device: torch.device) -> Pairs:
    from micro.kernels import triton

    vector = _vector(2 * numel, dtype, device, 0).mul(4).round()
    values = _vector(numel, dtype, device, 1).mul(4).round()  # whole numbers: their sums are exact
    indices = torch.randperm(2 * numel, generator=generator(numel))[:numel].to(torch.int32).to(device)
    indices[::3], indices[1::5] = 2 * numel, -1
    expected = vector.clone()
    triton.scatter_add_(vector, indices, values)
    reference.scatter_add_(expected, indices, values)
    return [(vector, expected)]


def _sums(numel: int, dtype: torch.dtype, device: torch.device) -> Pairs:
    from micro.kernels import sums
    from micro.kernels.triton import checking, summing

    x = _vector(numel, dtype, device, 0)
    pairs = [(summing.sums(x, floor), sums.in_torch(x, floor)) for floor in (-1.0, 0.0, 1.25)]
    return [(torch.tensor(checking.are_near(*pair)), torch.tensor(True)) for pair in pairs]


def _absorb_and_sum(numel: int, dtype: torch.dtype, device: torch.device) -> Pairs:
    from micro.kernels import sums
    from micro.kernels.triton import checking, summing

    residual, grad, expected, source = _gradients(numel, dtype, device)
    first_bad, found = summing.absorb_and_sum_(residual, grad)
    wanted = reference.absorb_flagged_(expected, source)
    is_near = checking.are_near(found.tolist(), sums.in_torch(expected, -1.0))
    return [(first_bad, wanted), (residual, expected), (grad, source), (torch.tensor(is_near), torch.tensor(True))]


def _largest(numel: int, dtype: torch.dtype, device: torch.device) -> Pairs:
    from micro.kernels import triton

    x, k = _vector(numel, dtype, device, 0), max(numel // 50, 1)
    return [(triton.largest(x, k, 500), reference.largest(x, k))] if numel > k else []


CHECKS: dict[str, Callable[[int, torch.dtype, torch.device], Pairs]] = {
    "absorb": _absorb,
    "absorb and collect": _collect,
    "above": _above,
    "count by magnitude": _counts,
    "scatter": _scatter,
    "sums": _sums,
    "absorb and sum": _absorb_and_sum,
    "largest": _largest,
}

if __name__ == "__main__":
    json.dump([asdict(each) for each in outcomes(torch.device("cpu"))], sys.stdout)
