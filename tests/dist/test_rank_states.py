"""The states of all ranks in one checkpoint: saved, loaded, gone on from; what other ranks and other numbers do."""

import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner

import micro
from micro import PeerError
from micro.checkpoints.rank_states import state_of
from micro.drivers import meeting
from tests.dist.ddp_steps import MICRO, TINY_MB, Net, build, ddp_gradients, one_loss, wrap
from tests.dist.fsdp_steps import attached
from tests.dist.on_ranks import of_all, on_ranks
from tests.dist.processes import ranks
from tests.refusals import refused

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


class Run:
    """A model, its optimizer and its attachment, as a script would make them."""

    def __init__(self) -> None:
        self.model, self.attachment = wrap(build(Net), MICRO, bucket_cap_mb=TINY_MB)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train(self, steps: range) -> Tensor:
        """Return the weights after these steps."""
        for step in steps:
            ddp_gradients(self.model, one_loss, step)
            self.optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


@on_ranks(2)
def test_both_ranks_go_on_from_one_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    rank, whole, resumed = dist.get_rank(), Run(), Run()
    whole.train(range(3))
    state = {"model": whole.model.module.state_dict(), "micro": micro.RankStates(whole.attachment)}
    dcp.save(state, checkpoint_id=str(tmp_path))
    first, second = of_all(float(torch.cat(whole.attachment.residuals()).abs().sum()))
    assert first != second, "the ranks' residuals are equal: this test would not see rank 0's on rank 1"
    weights = resumed.model.module.state_dict()
    dcp.load({"model": weights, "micro": micro.RankStates(resumed.attachment)}, checkpoint_id=str(tmp_path))
    resumed.model.module.load_state_dict(weights)
    assert torch.equal(resumed.train(range(3, 6)), whole.train(range(3, 6)))

    raw: dict[str, dict[str, bytes]] = {"micro": {"rank0": b"", "rank1": b""}}
    dcp.load(raw, checkpoint_id=str(tmp_path))
    states = [state_of(raw["micro"][f"rank{each}"]) for each in range(2)]
    whole.attachment.load_state_dict(states[rank])
    other, of_three = states[1 - rank], micro.average(states, 3)[rank]
    refused(lambda: whole.attachment.load_state_dict(other), f"rank {1 - rank}, this is rank {rank}", "every rank")
    refused(lambda: whole.attachment.load_state_dict(of_three), "micro.average(states, 2)[rank]", "world_size 3")


def save(folder: Path) -> Tensor:
    """Save the states of these ranks, and return the residual of this one."""
    run = Run()
    run.train(range(2))
    dcp.save({"micro": micro.RankStates(run.attachment)}, checkpoint_id=str(folder))
    return torch.cat(run.attachment.residuals())


def load(folder: Path, expected: Tensor) -> None:
    """Load on another number of ranks than saved: all refuse, or the states are averaged."""
    run = Run()

    def load(planner: DefaultLoadPlanner | None = None, *, resize: bool = False) -> None:
        state = {"micro": micro.RankStates(run.attachment, resize=resize)}
        dcp.load(state, checkpoint_id=str(folder), planner=planner)

    for planner in (None, DefaultLoadPlanner(allow_partial_load=True)):
        said = of_all(refused(lambda planner=planner: load(planner), "world_size", "resize=True"))  # type: ignore[misc]
        assert all(said[0] in each for each in said)  # the others say that rank 0 refused
    load(resize=True)
    assert torch.allclose(torch.cat(run.attachment.residuals()), expected, rtol=0, atol=1e-7)
    run.train(range(2, 4))
    run.attachment.close()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_is_refused_by_all_or_averaged(tmp_path: Path, before: int, after: int) -> None:
    residuals = ranks(before).run(save, tmp_path)
    ranks(after).run(load, tmp_path, torch.stack(residuals).mean(0))


def save_shards(folder: Path) -> None:
    _, attachment = attached(MICRO)
    dcp.save({"micro": micro.RankStates(attachment)}, checkpoint_id=str(folder))


def load_shards(folder: Path) -> None:
    _, attachment = attached(MICRO)
    for resize in (False, True):
        state = {"micro": micro.RankStates(attachment, resize=resize)}
        refused(lambda state=state: dcp.load(state, checkpoint_id=str(folder)), "no mean")  # type: ignore[misc]
    attachment.close()


def test_shards_of_another_number_of_ranks_are_refused_by_all(tmp_path: Path) -> None:
    ranks(2).run(save_shards, tmp_path)
    ranks(4).run(load_shards, tmp_path)


@pytest.mark.parametrize("driver", ["attach", "LocalSteps"])
@on_ranks(2)
def test_a_state_of_all_ranks_that_one_rank_asks_for_ends_the_steps_of_the_others(driver: str) -> None:
    """Rank 0 saves under ``if rank == 0``, and rank 1 trains on."""
    run = Run()
    if driver == "attach":
        run.train(range(2))
        attachment, go_on = run.attachment, lambda: run.train(range(2, 4))
    else:
        run.attachment.close()
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        attachment = micro.LocalSteps(model, optimizer, MICRO, every=1)  # type: ignore[assignment]

        def go_on() -> Tensor:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            return torch.empty(0)

    started = time.monotonic()
    save_or_train = (lambda: micro.AllRanks(attachment).state_dict()) if dist.get_rank() == 0 else go_on
    said = refused(save_or_train, "rank 1 began a step", "all ranks", error=(PeerError, RuntimeError))
    assert "if rank == 0" in said
    assert time.monotonic() - started < 60
    attachment.close()


@on_ranks(2)
def test_a_rank_that_comes_late_to_the_state_of_all_is_named_and_waited_for() -> None:
    run, store = Run(), dist.distributed_c10d._get_default_store()
    run.train(range(1))
    meeting.PATIENCE_S, patience_s = 0.0, meeting.PATIENCE_S
    dist.barrier()
    try:
        if dist.get_rank() == 1:
            store.wait(["rank 0 has warned"])
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda *_, **__: store.set("rank 0 has warned", "1")
            state = micro.AllRanks(run.attachment, everywhere=True).state_dict()
    finally:
        meeting.PATIENCE_S = patience_s
    assert len(state["ranks"]) == 2
