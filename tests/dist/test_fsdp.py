"""attach_fsdp() on four real ranks, two nodes of two: what must hold between the replicas of a sharded model."""

import re
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import micro
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome
from tests.dist.ddp_steps import words_of
from tests.dist.fsdp_steps import (
    MICRO,
    TOPK,
    attached,
    backward,
    build,
    check_books,
    meshes,
    same,
    shards,
    summed,
    train,
    update_,
    weights,
)
from tests.dist.on_ranks import of_all, on_ranks, the_same
from tests.dist.processes import COLLECTIVE_S
from tests.faults import Fault, Faulty, InjectedError
from tests.refusals import refused

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("four ranks")]

REDUCERS = {"topk": TOPK, "micro": MICRO, "split": micro.Split(reducer=MICRO, min_dims=2)}


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


@on_ranks(4)
def test_the_dense_reducer_equals_the_replicas_of_fsdp_itself_and_a_closed_model_is_left_to_them() -> None:
    mesh, _, node = meshes()
    (net, attachment), own = attached(micro.DenseReducer()), build(mesh)
    for mine, theirs in zip(train(net, range(3)), train(own, range(3)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    before = num_groups()
    attachment.close()
    assert num_groups() == before - 1
    for mine, theirs in zip(train(net, range(3, 5)), train(own, range(3, 5)), strict=True):
        torch.testing.assert_close(mine, theirs)
    again = micro.attach_fsdp(net, MICRO, replicas=node)
    train(net, range(1))
    assert len(again.stats) == 4


@pytest.mark.parametrize("name", REDUCERS)
@on_ranks(4)
def test_nothing_is_lost_of_nodes_that_use_different_modules(name: str) -> None:
    check_books(REDUCERS[name])


@pytest.mark.parametrize("name", REDUCERS)
@on_ranks(4)
def test_replicas_stay_equal_bit_for_bit_and_a_restored_run_equals_the_uninterrupted_one(name: str) -> None:
    (net, attachment), (again, second) = attached(REDUCERS[name]), attached(REDUCERS[name])
    train(net, range(4))
    stats, values = list(attachment.stats), weights(net)
    assert [each.step for each in stats] == [3] * len(stats)
    assert sum(each.global_count for each in stats) < sum(each.numel for each in stats)
    first, second_node = of_all((values, [(each.counts, each.global_count) for each in stats]))[
        dist.get_rank() % 2 :: 2
    ]
    assert same(first[0], second_node[0])
    assert first[1] == second_node[1]
    with torch.no_grad():
        for key, parameter in again.named_parameters():
            parameter.to_local().copy_(values[key])
    second.load_state_dict(attachment.state_dict())
    assert all(map(same, train(net, range(4, 7)), train(again, range(4, 7))))


@on_ranks(4)
def test_a_nan_on_one_rank_stops_all_and_training_can_continue() -> None:
    net, _ = attached(MICRO)
    train(net, range(2))
    factor = float("nan") if dist.get_rank() == 3 else 1.0
    words = the_same(words_of(micro.NonFiniteGradient, lambda: backward(net, 2, factor)))
    assert "on node 1 is not finite at step 2" in words
    assert not any(shard.any() for shard in shards(net).values())
    update_(net)
    assert all(torch.isfinite(shard).all() for step in train(net, range(3, 5)) for shard in step.values())


@pytest.mark.parametrize("clip_norm", ["node", "global"])
@on_ranks(4)
def test_the_norm_of_all_shards_is_bounded(clip_norm: str) -> None:
    (_, local, node), clip = meshes(), 2.0
    alone, net = build(local), build(local)
    micro.attach_fsdp(net, micro.DenseReducer(), replicas=node, clip=clip, clip_norm=clip_norm)
    for model in (alone, net):
        backward(model, 0, factor=1.0 + 5.0 * node.get_local_rank())
    own = shards(alone)
    square = summed({"": torch.stack([shard.square().sum() for shard in own.values()]).sum()}, local)
    if clip_norm == "global":
        square = {"": summed(square, node)[""] / 2}
    scale = min(1.0, clip / float(square[""]) ** 0.5)
    expected = summed({name: shard * scale / 2 for name, shard in own.items()}, node)
    torch.testing.assert_close(shards(net), expected, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Failing(micro.SparseReducer):
    """Fails on rank 1 in its second step, before it asks anything of others."""

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        if dist.get_rank() == 1 and state.step == 1:
            raise InjectedError("at once")
        return micro.SparseReducer.reduction(self, state, grad, comm)


AT_ONCE = Failing(micro.TopK(), density=0.1, exchange=micro.Gather())
IN_THE_MIDDLE = Faulty(reducer=TOPK, fault=Fault("fails", rank=1, at=0, op="AllGatherLists"), step=1)


@pytest.mark.parametrize(
    ("reducer", "error", "failing"), [(AT_ONCE, "at once", [1]), (IN_THE_MIDDLE, "in AllGatherLists", [2, 3])]
)
@on_ranks(4)
def test_a_reducer_that_fails_ends_the_backward_of_all_and_leaves_nothing_to_go_on_from(
    reducer: micro.Reducer, error: str, failing: list[int]
) -> None:
    net, attachment = attached(reducer)
    train(net, range(1))
    started = time.perf_counter()
    with pytest.raises((InjectedError, RuntimeError)) as caught:
        backward(net, 1)
    assert time.perf_counter() - started < COLLECTIVE_S / 3
    assert (str(caught.value) == error) == (dist.get_rank() in failing)
    assert not any(shard.any() for shard in shards(net).values())
    if len(failing) == 2:
        assert error in str(caught.value)
        assert re.match(r"step [12] broke off \(", words_of(RuntimeError, attachment.state_dict))
    attachment.close()


@on_ranks(4)
def test_what_cannot_work_is_refused_on_all_ranks_with_nothing_left_behind() -> None:
    mesh, local, node = meshes()
    sharded, is_first = build(local), dist.get_rank() < 2
    usual: dict[str, Any] = {"model": sharded, "reducer": MICRO, "replicas": node}
    other = build(local, seed=dist.get_rank() // 2)
    before = num_groups()
    for given, key in (
        ({"replicas": local}, "must be the ranks that hold the same shard"),
        ({"replicas": mesh}, "one dimension, got 2"),
        ({"model": build(mesh)}, "averages densely by itself"),
        ({"model": other}, "weights must be the same on all ranks"),
        ({"reducer": MICRO if is_first else TOPK}, "settings must be the same on all ranks, rank 0 has reducer"),
        ({"clip": 1.0 if is_first else 2.0}, "settings must be the same on all ranks, rank 0 has clip="),
        ({"clip": -1.0 if dist.get_rank() == 3 else 1.0}, "clip must be positive, got -1.0"),
    ):
        refused(lambda given=given: micro.attach_fsdp(**usual | given), key)  # type: ignore[misc]
    assert num_groups() == before
