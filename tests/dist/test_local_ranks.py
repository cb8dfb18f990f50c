"""Local steps on real ranks: the rounds of simulated ones, bit for bit; rounds between replicas that DDP trains."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.comm.ranks import Comm
from micro.local import save_round, take_round
from tests.dist.on_ranks import of_all, on_ranks, the_same
from tests.dist.processes import ranks
from tests.local_training import ADAM, SGD, SPARSE, backward, flat, network, simulated
from tests.refusals import refused

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
STREAMING: dict[str, Any] = {"fragments": 2, "delay": 2, "mix": 0.5}


def all_values(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in model.state_dict().values()])


def rounds(comm: Comm | None, model: nn.Module, rank: int, streaming: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    """Return weights and buffers within a round and after its end, and the bytes of the last round."""
    optimizer = ADAM(model.parameters())
    reducer = micro.SparseReducer(micro.Micro(), 0.2, feedback=micro.ErrorFeedback(decay=0.95))
    with micro.LocalSteps(model, optimizer, reducer, comm=comm, **({"every": 3} | streaming)) as local:
        for step in range(7):
            backward(model, step, rank)
            optimizer.step()
        within = all_values(model)
        local.finish()
        return within, all_values(model), local.stats.bytes_sent


def on_this_rank(streaming: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    return rounds(None, network(has_norm=True), dist.get_rank(), streaming)


OWN_PACE = {"every": [4, 3]}  # rank 1 begins its third round while rank 0 has finished in the middle of its second


@pytest.mark.parametrize("streaming", [{}, STREAMING, OWN_PACE, STREAMING | OWN_PACE])
def test_real_ranks_take_the_steps_of_simulated_ones_bit_for_bit(streaming: dict[str, Any]) -> None:
    models = [network(has_norm=True), network(has_norm=True)]
    expected = simulated(2, lambda comm: rounds(comm, models[comm.rank], comm.rank, streaming))
    found = ranks(2).run(on_this_rank, streaming)
    for (within, after, sent), (own_within, own_after, own_sent) in zip(found, expected, strict=True):
        assert torch.equal(within, own_within)
        assert torch.equal(after, own_after)
        assert sent == own_sent
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@on_ranks(2)
def test_ranks_that_differ_in_the_length_of_their_rounds_are_refused_unless_all_give_it() -> None:
    rank, model = dist.get_rank(), network()
    for every in (3 + rank, [3, 2 + rank], [3, 2] if rank else 3, [3, 2, 2]):
        with micro.LocalSteps(model, SGD(model.parameters()), micro.DenseReducer(), every=[5, 1]) as local:
            assert local.every == (1 if rank else 5)
        refused(lambda every=every: micro.LocalSteps(model, SGD(model.parameters()), SPARSE, every=every), "every")  # type: ignore[misc]


@on_ranks(2)
def test_training_continues_during_an_exchange() -> None:
    """Rank 1 begins an exchange only when rank 0 has taken a step after beginning it."""
    rank, model, word = dist.get_rank(), network(), torch.zeros(1)
    optimizer = SGD(model.parameters())
    with micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=2, delay=1) as local:
        for step in range(3):
            backward(model, step, rank)
            if rank == 1 and step == 1:
                dist.recv(word, 0)
            if rank == 0 and step == 2:
                dist.send(torch.ones(1), 1)
            optimizer.step()
        assert local.num_rounds == 1


@on_ranks(2)
def test_a_state_is_loaded_while_an_exchange_is_under_way() -> None:
    """Also where that exchange is not finite; so may the weights be, and the steps restarted."""
    rank, model = dist.get_rank(), network()
    optimizer, begun = SGD(model.parameters()), model.state_dict()

    def step(number: int, *, factor: float = 1.0) -> None:
        backward(model, number, rank)
        model.a.bias.grad.mul_(factor)  # type: ignore[union-attr]
        optimizer.step()

    with micro.LocalSteps(model, optimizer, micro.SparseReducer(micro.TopK(), 0.25), every=4, delay=2) as local:
        for number in range(3):
            step(number)
        saved = copy.deepcopy(local.state_dict())
        for factor in (1.0, float("nan")):
            step(3, factor=factor)
            local.load_state_dict(saved)
        for number in range(3, 12):
            step(number)
        local.finish()
        the_same(flat(model))
        begun = copy.deepcopy(model.state_dict())
        for number in range(4):
            step(number, factor=float("nan"))
        model.load_state_dict(begun)
        local.restart()
        for number in range(5):
            step(number)
        local.finish()
        the_same(flat(model))


@on_ranks(2)
def test_buffers_are_the_model_s_own_whatever_its_state_holds() -> None:
    """A hook may copy what state_dict returns; extra state may be a tensor of another length on each rank."""
    rank, model = dist.get_rank(), network(has_norm=True)
    model.register_state_dict_post_hook(lambda _, state, *__: [state.update({k: v.clone()}) for k, v in state.items()])
    model.a.get_extra_state = lambda: torch.zeros(3 + rank)  # type: ignore[union-attr]
    optimizer = SGD(model.parameters())
    with micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=1, buffers="mean") as local:
        backward(model, rank, rank)
        optimizer.step()
        the_same(model.norm.running_mean)  # type: ignore[arg-type]
        assert local.stats.buffer_bytes < 200


@on_ranks(2)
def test_states_of_the_middle_of_a_round_have_no_average() -> None:
    model = network()
    optimizer = SGD(model.parameters())
    with micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=2) as local:
        states: list[Any] = []
        for number in range(2):
            backward(model, number, dist.get_rank())
            optimizer.step()
            states.append([{}, {}])
            dist.all_gather_object(states[number], local.state_dict())
    refused(lambda: micro.average(states[0], 1), "finish()")
    assert len(micro.average(states[1], 1)) == 1


@on_ranks(4)
def test_ddp_may_go_on_within_a_replica_and_nowhere_else() -> None:
    """Two replicas of two ranks each: DDP within, rounds between."""
    rank = dist.get_rank()
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    peers = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DistributedDataParallel(network(), process_group=nodes[rank // 2])
    optimizer = SGD(model.parameters())
    local = partial(micro.LocalSteps, model, optimizer, micro.DenseReducer(), every=2)
    refused(local, "averages gradients with rank", "by DistributedDataParallel")
    refused(lambda: local(replicas=peers[rank % 2], every=2 + rank % 2), "every")  # apart within a replica
    refused(lambda: local(replicas=peers[rank % 2], every=2 if rank else 0), "every")  # one rank's mistake
    with local(replicas=peers[rank % 2]):
        backward(model, 0, rank)
        optimizer.step()
        within = of_all(flat(model))
        assert torch.equal(within[0], within[1])
        assert torch.equal(within[2], within[3])
        assert not torch.equal(within[0], within[2])
        backward(model, 1, rank)
        optimizer.step()
    the_same(flat(model))


def load(model: nn.Module) -> None:
    model.load_state_dict(network(has_norm=True).state_dict())


def move(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(flat(model) + 1, model.parameters())


def register(model: nn.Module) -> None:
    model.register_buffer("more", torch.zeros(2))


def fails_alone(at: int, change: Any, name: str) -> None:
    rank, model = dist.get_rank(), network(has_norm=True)
    optimizer = SGD(model.parameters())

    def train(*steps: int) -> None:
        for number in steps:
            backward(model, number, rank)
            optimizer.step()

    with micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=2) as local:
        train(*range(at))
        if rank == 1:
            change(model)
        refused(lambda: [train(at), local.finish()], name, error=RuntimeError)


@pytest.mark.parametrize(
    ("at", "change", "name"),
    [
        (2, load, "a.weight"),
        (2, move, "a.weight"),
        (3, load, "a.weight"),
        (3, register, "more"),
    ],
)
def test_what_one_rank_alone_changes_ends_all_ranks_at_once(at: int, change: Any, name: str) -> None:
    ranks(2).run(fails_alone, at, change, name, timeout_s=30)


def takes_a_torn_file(folder: Path) -> None:
    rank, model = dist.get_rank(), network()
    optimizer, path = SGD(model.parameters()), folder / f"{dist.get_rank()}.pt"
    with micro.LocalSteps(model, optimizer, SPARSE, every=1) as local:
        backward(model, 0, rank)
        optimizer.step()
        save_round(local, path)
    if rank == 1:
        path.write_bytes(path.read_bytes()[:-2000])
    with (
        micro.LocalSteps(model, optimizer, SPARSE, every=1) as local,
        pytest.raises((ValueError, RuntimeError)) as error,
    ):
        take_round(local, path)
    assert "1.pt" in str(error.value)


def test_a_torn_file_of_one_rank_ends_all_ranks_at_once(tmp_path: Path) -> None:
    ranks(2).run(takes_a_torn_file, tmp_path, timeout_s=30)
