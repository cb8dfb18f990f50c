"""What tests of parts share: values, simulations, and vectors made of indices and values."""

from typing import Any

import torch
from torch import Tensor

import micro
from micro.comm.loop import carried_out
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.simulate import SimulatedStep
from micro.values.sparse import Selection, SparseValues, Step

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def simulated(
    part: micro.Reducer | micro.Selector[Any],
    layout: micro.Layout | int,
    world_size: int,
    *,
    density: Any = 0.1,
    dtype: torch.dtype = torch.float64,
    **parts: Any,
) -> micro.Simulation:
    """Return a simulation of a reducer, or of a selector with these parts, by default of one vector of so many."""
    reducer = part if isinstance(part, micro.Reducer) else micro.SparseReducer(part, density, **parts)
    layout = layout if isinstance(layout, micro.Layout) else micro.Layout.flat(layout)
    return micro.Simulation(reducer, layout, world_size, dtype=dtype)


def kept(simulation: micro.Simulation) -> Tensor:
    """Return a copy (world_size, numel) of the residuals."""
    return torch.stack(simulation.residuals())


def exactly(simulation: micro.Simulation, acc: Tensor) -> SimulatedStep:
    """Take a step whose accumulators are ``acc`` (world_size, numel)."""
    return simulation.step(acc - kept(simulation), residuals=True)


def alone(reduction: Reduction[Any]) -> Any:
    """Return what a reduction gives on a rank that is alone."""
    return carried_out(reduction, Comm())


def select(selector: micro.Selector[Any], acc: Tensor, k: int, state: Any = None, index: int = 0) -> Selection:
    step = Step(index, k, 0, micro.Layout.flat(acc.numel()))
    found: Selection = alone(selector.select(selector.start() if state is None else state, acc, step, Comm()))
    return found


def places(vector: Tensor) -> list[int]:
    """Return where a vector is not zero."""
    found: list[int] = vector.nonzero().view(-1).tolist()
    return found


def dense(numel: int, *parts: SparseValues) -> Tensor:
    """Return the vector (numel,) of indices, which are of 32 bits, and values."""
    vector = torch.zeros(numel, dtype=torch.float64)
    for part in parts:
        assert part.indices.dtype == torch.int32
        part.add_to_(vector)
    return vector


# --- values of several laws -------------------------------------------------------------------------------------------


def _normal(randomness: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=randomness, dtype=torch.float64)


def _laplace(randomness: torch.Generator, *shape: int) -> Tensor:
    uniform = torch.rand(*shape, generator=randomness, dtype=torch.float64)
    return (1 - uniform).log() * _normal(randomness, *shape).sign()


def _student(randomness: torch.Generator, *shape: int) -> Tensor:
    return _normal(randomness, *shape) / (_normal(randomness, 3, *shape) ** 2).mean(0).sqrt()


def _layered(randomness: torch.Generator, *shape: int) -> Tensor:
    scales = torch.logspace(-4, 0, 16, dtype=torch.float64)[torch.arange(16) * 5 % 16]  # large and small mixed
    sizes = [len(part) for part in torch.arange(shape[-1]).tensor_split(16)]
    return _normal(randomness, *shape) * scales.repeat_interleave(torch.tensor(sizes))


STREAMS = {"normal": _normal, "laplace": _laplace, "student": _student, "layers": _layered}
