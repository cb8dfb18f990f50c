"""TwoLevel on four real ranks, two nodes of two: the same as in the simulation, and behind DDP's hook."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.group_comm import GroupComm
from tests.dist.ddp_steps import TINY_MB, Net, build, ddp_gradients, local_gradients, named, one_loss, some_unused, wrap
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("four ranks")]

BETWEEN = {
    "micro": micro.SparseReducer(micro.Micro(), density=0.1),
    "topk+gather+half": micro.SparseReducer(micro.TopK(), density=0.1, exchange=micro.Gather(), codec=micro.Half()),
    "dense": micro.DenseReducer(),
    "split": micro.Split(reducer=micro.SparseReducer(micro.Micro(), density=0.1), min_dims=2),
}


def two_level(name: str, ranks_per_node: int = 2) -> micro.TwoLevel:
    return micro.TwoLevel(reducer=BETWEEN[name], ranks_per_node=ranks_per_node)


def all_gradients(step: int) -> Tensor:
    return torch.randn(4, 1009, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


# What runs on the ranks


def reduce_here(name: str) -> list[tuple[Tensor, micro.StepStats]]:
    """Return, per step, this rank's copy of the update and its statistics."""
    reducer, comm = two_level(name), GroupComm()
    state = reducer.start(micro.Layout.flat(1009), torch.float64, torch.device("cpu"))
    outcomes = []
    for step in range(4):
        grad = all_gradients(step)[comm.rank].clone()
        comm.begin_step()
        stats = reducer.reduce_(state, grad, comm)
        outcomes.append((grad, stats))
    comm.close()
    return outcomes


def keep_books(name: str, chosen: dict[str, Any]) -> tuple[float, float, list[int]]:
    """Return the sum of all nodes' gradients over all steps; what was applied and what waits; steps of the buckets."""
    ddp = DistributedDataParallel(build(Net), bucket_cap_mb=TINY_MB)
    attachment = micro.attach(ddp, two_level(name), **chosen)
    given = booked = 0.0
    for step in range(5):
        given += total(local_gradients(ddp.module, one_loss, step)) / 2  # two ranks make one node
        booked += total(ddp_gradients(ddp, one_loss, step)) / 2  # two nodes, summed over four ranks
    booked += sum(float(residual.sum()) for residual in attachment.residuals() if residual.numel())
    sums = torch.tensor([given, booked], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0]), float(sums[1]), [stats.step for stats in attachment.stats]


def total(tensors: dict[str, Tensor]) -> float:
    return float(sum(tensor.sum() for tensor in tensors.values()))


def resumed(settings: dict[str, Any]) -> tuple[bool, list[Tensor]]:
    """Return whether a restored run takes the steps of an uninterrupted one; this rank's last gradients."""
    ddp, attachment = wrap(build(Net), two_level("micro"), **settings)
    losses = some_unused if settings.get("find_unused_parameters") else one_loss
    for step in range(3):
        ddp_gradients(ddp, losses, step)
    saved = attachment.state_dict()
    again, second = wrap(build(Net), two_level("micro"), **settings)
    second.load_state_dict(saved)
    same = []
    for step in range(3, 7):
        mine, theirs = ddp_gradients(ddp, losses, step), ddp_gradients(again, losses, step)
        same.append(all(torch.equal(mine[name], theirs[name]) for name in mine))
    return all(same), list(mine.values())


def refused_and_closed() -> tuple[str, list[int]]:
    """Return the words of a refusal; the number of process groups before, after it, with an attachment, and closed."""
    ddp = DistributedDataParallel(build(Net))
    numbers = [num_groups()]
    with pytest.raises(ValueError, match="ranks_per_node") as caught:
        micro.attach(ddp, two_level("micro", 3))
    numbers.append(num_groups())
    with micro.attach(ddp, two_level("micro")):
        ddp_gradients(ddp, one_loss, 0)
        numbers.append(num_groups())
    numbers.append(num_groups())
    plain = DistributedDataParallel(build(Net))
    mine, theirs = ddp_gradients(ddp, one_loss, 1), ddp_gradients(plain, one_loss, 1)
    assert all(torch.allclose(mine[name], theirs[name]) for name in named(plain.module))
    return str(caught.value), numbers


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def nan_here() -> tuple[str, bool]:
    """Return the words with which a NaN on the last rank stops this one; whether the next step is finite."""
    ddp, _ = wrap(build(Net), two_level("micro"), bucket_cap_mb=TINY_MB)
    ddp_gradients(ddp, one_loss, 0)
    factor = float("nan") if dist.get_rank() == 3 else 1.0
    with pytest.raises(micro.NonFiniteGradient) as caught:
        (next(one_loss(ddp, 1)) * factor).backward()
    after = ddp_gradients(ddp, one_loss, 2)
    return str(caught.value), all(bool(torch.isfinite(grad).all()) for grad in after.values())


# The tests


@pytest.mark.parametrize("name", ["micro", "topk+gather+half", "dense"])
def test_processes_equal_the_simulation(name: str) -> None:
    processes = ranks(4).run(reduce_here, name)
    simulation = micro.Simulation(two_level(name), micro.Layout.flat(1009), 4, dtype=torch.float64)
    for step in range(4):
        expected = simulation.step(all_gradients(step))
        for rank, outcomes in enumerate(processes):
            update, stats = outcomes[step]
            assert torch.equal(update, processes[0][step][0]), "replicas drift apart"
            torch.testing.assert_close(update, expected.update, rtol=1e-11, atol=1e-13)
            theirs = expected.stats[rank]
            assert (stats.counts, stats.global_count) == (theirs.counts, theirs.global_count)
            assert (stats.bytes_sent, stats.local_bytes) == (theirs.bytes_sent, theirs.local_bytes)
            assert (stats.calls, stats.local_calls) == (theirs.calls, theirs.local_calls)
    simulation.close()


@pytest.mark.parametrize(
    ("name", "chosen"), [("micro", {}), ("dense", {}), ("split", {}), ("micro", {"dense": "*.bias"})]
)
def test_nothing_of_a_gradient_is_lost_behind_the_hook(name: str, chosen: dict[str, Any]) -> None:
    for given, booked, steps in ranks(4).run(keep_books, name, chosen):
        assert booked == pytest.approx(given, rel=1e-9, abs=1e-9)
        assert set(steps) == {4}


@pytest.mark.parametrize("settings", [{"bucket_cap_mb": TINY_MB}, {"find_unused_parameters": True}], ids=str)
def test_a_restored_run_equals_the_uninterrupted_one_bit_for_bit(settings: dict[str, Any]) -> None:
    (is_same, first), *others = ranks(4).run(resumed, settings)
    assert is_same
    for other_is_same, gradients in others:
        assert other_is_same
        assert all(torch.equal(one, other) for one, other in zip(first, gradients, strict=True))


def test_nodes_that_do_not_divide_the_ranks_are_refused_and_a_closed_attachment_leaves_no_group() -> None:
    for words, (before, refused, attached, closed) in ranks(4).run(refused_and_closed):
        assert words == "ranks_per_node must divide the number of ranks, got 3 for 4 ranks"
        assert (refused, attached, closed) == (before, before + 3, before)


def test_a_nan_on_one_rank_stops_all() -> None:
    words, go_on = zip(*ranks(4).run(nan_here), strict=True)
    assert len(set(words)) == 1
    assert "on rank 3 is not finite at step 1" in words[0]
    assert all(go_on)
