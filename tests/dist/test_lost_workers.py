"""A worker is killed within a round: the new group continues from the weights of the last round."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import micro
from micro.comm.ranks import Comm
from micro.feedback.base import Memory
from micro.local import LocalSteps, check_losable, regrouped, save_round, take_round
from micro.zoo.exdyna import ExDyna
from tests.local_training import ADAM, SPARSE, backward, flat, network, simulated
from tests.refusals import refused

pytestmark = pytest.mark.dist
EXDYNA = micro.SparseReducer(ExDyna(), 0.2)


@pytest.mark.parametrize(
    "reducer", [SPARSE, micro.Split(reducer=EXDYNA, min_dims=2), EXDYNA], ids=["", "split", "exdyna"]
)
def test_another_number_of_ranks_continues_from_the_end_of_a_round(reducer: micro.Reducer) -> None:
    def steps(world_size: int, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        models = [network() for _ in range(world_size)]

        def work(comm: Any) -> dict[str, Any]:
            model, optimizer = models[comm.rank], ADAM(models[comm.rank].parameters())
            with LocalSteps(model, optimizer, reducer, every=2, comm=comm) as local:
                if saved:
                    local.load_state_dict(regrouped(saved[comm.rank] if comm.rank < len(saved) else saved[0], comm))
                    assert bool(local.residuals()[0].any()) == (comm.rank < len(saved))
                for step in range(4):
                    if step == 3:
                        refused(lambda: regrouped(local.state_dict(), comm), "in the middle of a round")
                    backward(model, step, comm.rank)
                    optimizer.step()
                return {"weights": flat(model), **local.state_dict()}

        ended = simulated(world_size, work)
        assert all(torch.equal(state["weights"], ended[0]["weights"]) for state in ended)
        return [{key: value for key, value in state.items() if key != "weights"} for state in ended]

    saved: list[dict[str, Any]] = []
    for world_size in (3, 2, 4):
        saved = steps(world_size, saved)
    assert saved[0]["num_rounds"] == 6


def test_what_all_ranks_keep_a_share_or_a_sum_of_cannot_be_lost(tmp_path: Path) -> None:
    shared = micro.TwoLevel(reducer=SPARSE, ranks_per_node=2)
    refused(lambda: check_losable(shared), "reducer two_level keeps a share of a node's residual on each of its ranks")
    model: nn.Module = network()
    optimizer = ADAM(model.parameters())
    reducer = micro.SparseReducer(micro.TopK(), 0.2, micro.Gather(), feedback=Summing())
    with LocalSteps(model, optimizer, reducer, every=2, comm=Comm()) as local:
        refused(lambda: save_round(local, tmp_path / "0.pt"), "a worker cannot be lost; use feedback residual, or none")
        backward(model, 0, 0)
        optimizer.step()
        refused(lambda: save_round(local, tmp_path / "0.pt"), "can be saved only at its end", error=RuntimeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summing(micro.ErrorFeedback):
    """Keeps a sum over all ranks besides the residual, as a part of another package may do."""

    name: ClassVar[str] = "summing"

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        return micro.ErrorFeedback.start(self, numel, dtype, device) | {"sum": torch.zeros(numel, device=device)}


def trained(comm: Comm, path: Path, steps: int, saved: int, seed: int = 0) -> nn.Module:
    """Take steps, each of them a round, and save the first of them; return the model."""
    model = network()
    optimizer = ADAM(model.parameters())
    with LocalSteps(model, optimizer, SPARSE, every=1, comm=comm) as local:
        for step in range(steps):
            backward(model, step + seed, comm.rank)
            optimizer.step()
            if step < saved:
                save_round(local, path)
    return model


def taken(comm: Comm, path: Path) -> tuple[Any, Tensor, Tensor]:
    """Take the last round up; return what was gone on from, this rank's residual and weights."""
    model = network()
    optimizer = ADAM(model.parameters())
    with LocalSteps(model, optimizer, SPARSE, every=1, comm=comm) as local:
        found = take_round(local, path)
        return found, local.residuals()[0].clone(), flat(model)


def test_a_round_of_another_group_is_ignored(tmp_path: Path) -> None:
    paths = [tmp_path / "0.pt", tmp_path / "1.pt"]
    for seed, path in enumerate(paths):  # each went on without the other, for as many rounds
        trained(Comm(), path, 1, 1, seed)
    (found, _, first), (_, _, second) = simulated(2, lambda comm: taken(comm, paths[comm.rank]))
    assert found.newcomers == (1,)
    assert torch.equal(first, second)


def test_an_earlier_round_than_the_others_is_left(tmp_path: Path) -> None:
    def work(comm: Comm) -> tuple[Any, Tensor]:
        path = tmp_path / f"{comm.rank}.pt"
        model = trained(comm, path, 3, saved=2 if comm.rank == 0 else 3)  # rank 0 was lost before it could save
        found, residual, weights = taken(comm, path)
        assert torch.equal(weights, flat(model))
        return found, residual

    (found, without), (other, kept), _ = simulated(3, work)
    assert found == other
    assert found.newcomers == (0,)
    assert not without.any()
    assert kept.any()
