"""attach_fsdp() on four real ranks, two nodes of two: what must hold between the replicas of a sharded model."""

import re
import runpy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import micro
from tests.dist.ddp_steps import words_of
from tests.dist.fsdp_steps import (
    MICRO,
    TOPK,
    attached,
    backward,
    build,
    check_books,
    keep_books,
    meshes,
    same,
    shards,
    summed,
    train,
    update_,
    weights,
)
from tests.dist.processes import COLLECTIVE_S, ranks
from tests.faults import Fault, Faulty, InjectedError

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("four ranks")]

SCRIPT = Path(__file__).parents[2] / "docs/gallery/train_fsdp.py"
REDUCERS = {"topk": TOPK, "micro": MICRO, "split": micro.Split(reducer=MICRO, min_dims=2)}


# What runs on the ranks


def dense_beside_hsdp() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return, per step, the gradients of the dense reducer and of FSDP's own replicas."""
    net, _ = attached(micro.DenseReducer())
    own = build(meshes()[0])
    return list(zip(train(net, range(3)), train(own, range(3)), strict=True))


def trained(reducer: micro.Reducer, settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[micro.StepStats]]:
    """Return this rank's weights after training, and the statistics of the last step."""
    net, attachment = attached(reducer, **settings)
    train(net, range(4))
    return weights(net), list(attachment.stats)


def resumed(reducer: micro.Reducer) -> bool:
    """Return whether a run that was stopped and restored takes the same steps as one that was not, bit for bit."""
    net, attachment = attached(reducer)
    train(net, range(3))
    saved, values = attachment.state_dict(), weights(net)
    again, second = attached(reducer)
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            parameter.to_local().copy_(values[name])
    second.load_state_dict(saved)
    steps = zip(train(net, range(3, 6)), train(again, range(3, 6)), strict=True)
    return all(same(one, other) for one, other in steps)


def nan_stops() -> tuple[str, bool, bool]:
    """Return the words of the error; whether all gradients were zero; whether the next steps are finite."""
    net, _ = attached(MICRO)
    train(net, range(2))
    with pytest.raises(micro.NonFiniteGradient) as caught:
        backward(net, 2, float("nan") if dist.get_rank() == 3 else 1.0)
    are_zero = not any(shard.any() for shard in shards(net).values())
    update_(net)
    applied = train(net, range(3, 5))
    return str(caught.value), are_zero, all(torch.isfinite(shard).all() for step in applied for shard in step.values())


def clipped(clip_norm: str, clip: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradient of a dense mean with clipping, and what it must be by the norms of whole gradients."""
    _, local, node = meshes()
    alone, net = build(local), build(local)
    micro.attach_fsdp(net, micro.DenseReducer(), replicas=node, clip=clip, clip_norm=clip_norm)
    for model in (alone, net):
        backward(model, 0, factor=1.0 + 5.0 * node.get_local_rank())
    own = shards(alone)
    square = summed({"": torch.stack([shard.square().sum() for shard in own.values()]).sum()}, local)
    if clip_norm == "global":
        square = {"": summed(square, node)[""] / 2}
    scale = min(1.0, clip / float(square[""]) ** 0.5)
    expected = summed({name: shard * scale for name, shard in own.items()}, node)
    return shards(net), {name: shard / 2 for name, shard in expected.items()}


def one_reducer_fails() -> tuple[str, float, bool]:
    """Return what each rank raises where the reducer of rank 1 does; after which time; whether gradients are zero."""
    net, attachment = attached(TOPK)
    train(net, range(1))
    launch = micro.SparseReducer.reduction
    if dist.get_rank() == 1:
        micro.SparseReducer.reduction = _fail  # type: ignore[method-assign, assignment]
    started = time.perf_counter()
    try:
        backward(net, 1)
        words = "nothing"
    except (RuntimeError, ZeroDivisionError) as error:
        words = str(error)
    finally:
        micro.SparseReducer.reduction = launch  # type: ignore[method-assign]
    elapsed_s = time.perf_counter() - started
    attachment.close()
    return words, elapsed_s, not any(shard.any() for shard in shards(net).values())


def fails_between_collectives() -> tuple[str, str]:
    """Return what each rank raises where those of the second node do in the middle of a step, and when it saves."""
    net, attachment = attached(Faulty(reducer=TOPK, fault=Fault("fails", rank=1, at=0, op="AllGatherLists"), step=1))
    train(net, range(1))
    kind: type[Exception] = InjectedError if dist.get_rank() >= 2 else micro.PeerError
    words = words_of(kind, lambda: backward(net, 1)), words_of(RuntimeError, attachment.state_dict)
    attachment.close()
    return words


def _fail(*_: object) -> None:
    raise ZeroDivisionError("of rank 1")


def closed_and_attached_again() -> tuple[bool, list[int], int]:
    """Return whether a closed model trains as FSDP's own replicas do; groups left; statistics after a new attach."""
    mesh, local, node = meshes()
    net, own = build(local), build(mesh)
    num_groups = [len(dist.distributed_c10d._world.pg_map)]
    with micro.attach_fsdp(net, MICRO, replicas=node):
        num_groups.append(len(dist.distributed_c10d._world.pg_map))
    num_groups.append(len(dist.distributed_c10d._world.pg_map))
    pairs = zip(train(net, range(2)), train(own, range(2)), strict=True)
    alike = all(torch.allclose(one[name], other[name]) for one, other in pairs for name in one)
    again = micro.attach_fsdp(net, MICRO, replicas=node)
    train(net, range(1))
    return alike, num_groups, len(again.stats)


def refusals(cases: list[str]) -> tuple[list[str], int]:
    """Return the words of each refusal, and how many process groups are left of them."""
    mesh, local, node = meshes()
    sharded, is_first = build(local), dist.get_rank() < 2
    given: dict[str, dict[str, Any]] = {
        "of this node": {"replicas": local},
        "two dimensions": {"replicas": mesh},
        "averages by itself": {"model": build(mesh)},
        "weights": {"model": build(local, seed=dist.get_rank() // 2)},
        "reducers": {"reducer": MICRO if is_first else TOPK},
        "clip": {"clip": 1.0 if is_first else 2.0},
        "one rank": {"clip": -1.0 if dist.get_rank() == 3 else 1.0},
    }
    num_groups = len(dist.distributed_c10d._world.pg_map)
    words = [
        words_of(
            ValueError,
            lambda case=case: micro.attach_fsdp(**{"model": sharded, "reducer": MICRO, "replicas": node} | given[case]),  # type: ignore[misc]
        )
        for case in cases
    ]
    return words, len(dist.distributed_c10d._world.pg_map) - num_groups


# The tests


def test_the_dense_reducer_equals_the_replicas_of_fsdp_itself() -> None:
    for steps in ranks(4).run(dense_beside_hsdp):
        for ours, theirs in steps:
            for name, shard in ours.items():
                torch.testing.assert_close(shard, theirs[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", REDUCERS)
def test_nothing_is_lost_of_nodes_that_use_different_modules(name: str) -> None:
    check_books(ranks(4).run(keep_books, REDUCERS[name]))


@pytest.mark.parametrize("name", REDUCERS)
def test_replicas_stay_equal_bit_for_bit(name: str) -> None:
    outcomes = ranks(4).run(trained, REDUCERS[name], {})
    for (weights_here, stats), (weights_there, others) in zip(outcomes[:2], outcomes[2:], strict=True):
        assert same(weights_here, weights_there)
        assert [each.step for each in stats] == [3] * len(stats)
        assert sum(each.global_count for each in stats) < sum(each.numel for each in stats)
        for mine, theirs in zip(stats, others, strict=True):
            assert (mine.counts, mine.global_count) == (theirs.counts, theirs.global_count)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_restored_run_equals_the_uninterrupted_one_bit_for_bit(name: str) -> None:
    assert ranks(4).run(resumed, REDUCERS[name]) == [True] * 4


def test_a_nan_on_one_rank_stops_all_and_training_goes_on() -> None:
    words, are_zero, go_on = zip(*ranks(4).run(nan_stops), strict=True)
    assert len(set(words)) == 1
    assert "on node 1 is not finite at step 2" in words[0]
    assert all(are_zero)
    assert all(go_on)


@pytest.mark.parametrize("clip_norm", ["node", "global"])
def test_the_norm_of_all_shards_is_bounded(clip_norm: str) -> None:
    for found, expected in ranks(4).run(clipped, clip_norm, 2.0):
        for name, shard in expected.items():
            torch.testing.assert_close(found[name], shard, rtol=1e-12, atol=1e-14)


def test_a_reducer_that_fails_on_one_rank_ends_the_backward_of_all() -> None:
    words, elapsed_s, are_zero = zip(*ranks(4).run(one_reducer_fails), strict=True)
    assert words[1] == "of rank 1"
    assert "nothing" not in words
    assert max(elapsed_s) < COLLECTIVE_S / 3
    assert all(are_zero)


def test_a_reducer_that_fails_in_the_middle_of_a_step_leaves_nothing_to_go_on_from() -> None:
    raised, refused = zip(*ranks(4).run(fails_between_collectives), strict=True)
    assert list(raised[2:]) == ["in AllGatherLists"] * 2
    assert list(raised[:2]) == [f"rank {rank} failed: InjectedError: in AllGatherLists" for rank in (2, 3)]
    assert all(re.match(r"step [12] broke off \(", words) for words in refused)


def test_a_closed_model_averages_densely_and_leaves_no_group() -> None:
    for alike, (before, during, after), num_stats in ranks(4).run(closed_and_attached_again):
        assert alike
        assert (during, after) == (before + 1, before)
        assert num_stats == 4


def run_script(words: list[str]) -> list[float]:
    losses: list[float] = runpy.run_path(str(SCRIPT))["main"](words)
    return losses


def test_the_script_of_the_page_trains_and_resumes_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    words = ["--ranks-per-node", "2"]
    whole = ranks(4).run_apart(run_script, [*words, "--steps", "40"])
    folder = ["--checkpoint", str(tmp_path / "checkpoint")]
    first = ranks(4).run_apart(run_script, [*words, *folder, "--steps", "20"])
    second = ranks(4).run_apart(run_script, [*words, *folder, "--steps", "40"])
    assert [one + other for one, other in zip(first, second, strict=True)] == whole
    assert sum(whole[0][-10:]) < 0.6 * sum(whole[0][:10])


REFUSED = {
    "of this node": "must be the ranks that hold the same shard",
    "two dimensions": "one dimension, got 2",
    "averages by itself": "averages densely by itself",
    "weights": "weights must be the same on all ranks",
    "reducers": "settings must be the same on all ranks, rank 0 has reducer",
    "clip": "settings must be the same on all ranks, rank 0 has clip=",
    "one rank": "clip must be positive, got -1.0",
}


def test_what_cannot_work_is_refused_on_all_ranks_with_nothing_left_behind() -> None:
    for words, num_left in ranks(4).run(refusals, list(REFUSED)):
        for said, key in zip(words, REFUSED.values(), strict=True):
            assert key in said
            assert "\n" not in said
        assert num_left == 0
