"""A worker that is killed within a round: the group that forms again goes on from the weights of the last one."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException

import micro
from micro.comm import Comm
from micro.local import LocalSteps, check_losable, regrouped, save_round, take_round
from micro.zoo.exdyna import ExDyna
from tests.dist.fresh_ranks import run_fresh
from tests.local_training import ADAM, SPARSE, backward, flat, network, simulated

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("fresh ranks")]
EVERY, KILLED_AT = 3, 7
EXDYNA = micro.SparseReducer(ExDyna(), 0.2)


def train(folder: Path, last: int, killed: int | None = None) -> tuple[Any, Tensor, Tensor]:
    """Take steps up to ``last``; return what was gone on from, this rank's residual then, and its last weights."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, model = dist.get_rank(), network(has_norm=True)
    optimizer, own = ADAM(model.parameters()), folder / f"{rank}.pt"
    with LocalSteps(model, optimizer, SPARSE, every=EVERY) as local:
        found = take_round(local, own)
        kept = local.residuals()[0].clone()
        while local.num_steps < last:
            if rank == killed and local.num_steps == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(model, local.num_steps, rank)
            optimizer.step()
            if local.is_equal:
                save_round(local, own)
        weights = flat(model)
    dist.destroy_process_group()
    return found, kept, weights


def saved(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)["local"]
    return state


def residual_of(state: dict[str, Any]) -> Tensor:
    return torch.cat(list(state["buckets"][0]["memory"]["residual"].values()))


def test_the_group_goes_on_without_a_killed_worker_and_takes_it_back(tmp_path: Path) -> None:
    with pytest.raises(ProcessException):
        run_fresh(2, train, tmp_path, 12, 1)
    before = saved(tmp_path / "0.pt")
    assert before["num_rounds"] == 2, "the third round broke off"
    (tmp_path / "1.pt").unlink()  # lost with its node
    ((found, kept, _),) = run_fresh(1, train, tmp_path, 9)
    assert (found.num_rounds, found.former_world_size, found.newcomers) == (2, 2, ())
    assert torch.equal(kept, residual_of(before))
    alone = saved(tmp_path / "0.pt")
    (found, kept, first), (other, none, second) = run_fresh(2, train, tmp_path, 12)
    assert found == other
    assert (found.num_rounds, found.former_world_size, found.newcomers) == (3, 1, (1,))
    assert torch.equal(kept, residual_of(alone))
    assert not none.any()
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "reducer", [SPARSE, micro.Split(reducer=EXDYNA, min_dims=2), EXDYNA], ids=["", "split", "exdyna"]
)
def test_another_number_of_ranks_goes_on_from_the_end_of_a_round(reducer: micro.Reducer) -> None:
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
                        with pytest.raises(
                            ValueError, match=r"at step \d+, in the middle of a round: ranks have weights"
                        ):
                            regrouped(local.state_dict(), comm)
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


def test_a_share_of_a_node_cannot_be_lost() -> None:
    with pytest.raises(ValueError, match="reducer two_level keeps a share of a node's residual on each of its ranks"):
        check_losable(micro.TwoLevel(reducer=SPARSE, ranks_per_node=2))


def test_what_all_ranks_keep_a_sum_of_cannot_be_lost(tmp_path: Path) -> None:
    model: nn.Module = network()
    optimizer = ADAM(model.parameters())
    reducer = micro.SparseReducer(micro.TopK(), 0.2, micro.Gather(), feedback=micro.EF21())
    with LocalSteps(model, optimizer, reducer, every=2, comm=Comm()) as local:
        with pytest.raises(ValueError, match="a worker cannot be lost; use feedback residual, or none"):
            save_round(local, tmp_path / "0.pt")
        backward(model, 0, 0)
        optimizer.step()
        with pytest.raises(RuntimeError, match="a round is saved at its end"):
            save_round(local, tmp_path / "0.pt")


def test_a_round_of_another_group_is_left(tmp_path: Path) -> None:
    paths = [tmp_path / "0.pt", tmp_path / "1.pt"]
    for seed, path in enumerate(paths):  # each went on without the other, for as many rounds
        model = network()
        optimizer = ADAM(model.parameters())
        with LocalSteps(model, optimizer, SPARSE, every=1, comm=Comm()) as local:
            backward(model, seed, 0)
            optimizer.step()
            save_round(local, path)
    models = [network(), network()]

    def work(comm: Any) -> tuple[Any, Tensor]:
        model = models[comm.rank]
        optimizer = ADAM(model.parameters())
        with LocalSteps(model, optimizer, SPARSE, every=1, comm=comm) as local:
            return take_round(local, paths[comm.rank]), flat(model)

    (found, first), (_, second) = simulated(2, work)
    assert found.newcomers == (1,)
    assert torch.equal(first, second)


def test_an_earlier_round_than_the_others_is_left(tmp_path: Path) -> None:
    def work(comm: Any) -> tuple[Any, Tensor]:
        model, own = network(), tmp_path / f"{comm.rank}.pt"
        optimizer = ADAM(model.parameters())
        with LocalSteps(model, optimizer, SPARSE, every=1, comm=comm) as local:
            for step in range(3):
                backward(model, step, comm.rank)
                optimizer.step()
                if comm.rank != 0 or step < 2:  # rank 0 was lost before it could save
                    save_round(local, own)
        again = network()
        optimizer = ADAM(again.parameters())
        with LocalSteps(again, optimizer, SPARSE, every=1, comm=comm) as local:
            found = take_round(local, own)
            assert torch.equal(flat(again), flat(model))
            return found, local.residuals()[0].clone()

    (found, without), (other, kept), _ = simulated(3, work)
    assert found == other
    assert found.newcomers == (0,)
    assert not without.any()
    assert kept.any()
