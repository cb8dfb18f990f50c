"""The life of an attachment among real ranks: it leaves nothing behind, and one rank's failure ends all."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import micro
from micro import private_comm
from micro.comm import Comm
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome
from micro.requests import Reduction
from tests.dist.ddp_steps import DENSE, MICRO, TINY_MB, Net, build, ddp_gradients, one_loss, words_of
from tests.dist.processes import COLLECTIVE_S, ranks
from tests.faults import Fault, Faulty, InjectedError

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
SOON_S = COLLECTIVE_S / 3


@dataclass(frozen=True, slots=True)
class FailingOnRank1(micro.DenseReducer):
    """Fails on rank 1 alone, in its second step, as a bug in it would."""

    name: ClassVar[str] = "failing"
    is_one_sum: ClassVar[bool] = False  # so that it is reduced beside backward, over a group of its own

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        if state.step == 1 and comm.rank == 1:
            raise LookupError("words of its own")
        return micro.DenseReducer.reduction(self, state, grad, comm)


class Raising(torch.autograd.Function):
    """An operation whose backward fails."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise LookupError("backward fails")


class NetThatFails(Net):
    """Its backward fails in the middle on rank 1."""

    def forward(self, x: Tensor, used: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        hidden = super().forward(x, used[:2])
        return super().forward(Raising.apply(hidden) if dist.get_rank() == 1 else hidden, used[2:])


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(build(Net), bucket_cap_mb=TINY_MB)


def ends(fails: Callable[[str, dist.ProcessGroup | None], tuple[str, float]], kind: str) -> tuple[str, float]:
    """Return how the backward of a rank ended, and after how many seconds.

    Args:
        kind: "made", the group that is made for the attachment; "own", one of the user's; "model", the model's.
    """
    group = None if kind == "made" else dist.new_group(range(dist.get_world_size()))
    ended = fails(kind, group)
    gc.collect()
    if group is not None:
        dist.destroy_process_group(group)  # a rank's waits for a collective that was left, until the other's is gone
    return ended


def attach_over(
    kind: str, group: dist.ProcessGroup | None, net: type[Net], reducer: micro.Reducer
) -> tuple[DistributedDataParallel, micro.Attachment]:
    own: dict[str, Any] = {"own": {"process_group": group}, "model": {"lane": "caller"}, "made": {}}[kind]
    models = group if kind == "model" else None
    model = DistributedDataParallel(build(net), bucket_cap_mb=TINY_MB, process_group=models)
    return model, micro.attach(model, reducer, **own)


def fail_in_the_reducer(kind: str, group: dist.ProcessGroup | None) -> tuple[str, float]:
    model, attachment = attach_over(kind, group, Net, FailingOnRank1())
    ddp_gradients(model, one_loss, 0)
    failed = how_it_ends(lambda: ddp_gradients(model, one_loss, 1))
    attachment.close()
    if kind != "model":
        with micro.attach(model, DENSE):
            assert all(bool(grad.any()) for grad in ddp_gradients(model, one_loss, 2).values())
    return failed


def fail_between_collectives(kind: str, group: dist.ProcessGroup | None) -> tuple[str, float]:
    """Fail in the middle of a step of a sparse method: what is kept is then neither gone on from nor saved."""
    reducer = Faulty(reducer=MICRO, fault=Fault("fails", rank=1, at=0, op="AllGatherLists"), step=1)
    model, attachment = attach_over(kind, group, Net, reducer)
    ddp_gradients(model, one_loss, 0)
    failed = how_it_ends(lambda: ddp_gradients(model, one_loss, 1))
    words_of(RuntimeError, attachment.state_dict).index("broke off (")
    attachment.close()
    return failed


def fail_in_backward(kind: str, group: dist.ProcessGroup | None) -> tuple[str, float]:
    model, attachment = attach_over(kind, group, NetThatFails, MICRO)

    def step() -> None:
        with attachment:
            ddp_gradients(model, one_loss, 0)

    return how_it_ends(step)


def how_it_ends(step: Callable[[], object]) -> tuple[str, float]:
    started = time.perf_counter()
    try:
        step()
    except (InjectedError, LookupError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - started
    return "no error", time.perf_counter() - started


def refuse_on_rank_1() -> str:
    model = wrapped()
    words = words_of(ValueError, lambda: micro.attach(model, MICRO, clip=-1.0 if dist.get_rank() == 1 else None))
    micro.attach(model, MICRO)
    return words


OTHER_DENSITY = micro.SparseReducer(micro.Micro(), density=0.2)
DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"reducer": OTHER_DENSITY}, "reducer sparse density=0.1, rank 1 reducer sparse density=0.2"),
    ({"start_step": 3}, "reducer sparse, rank 1 reducer split"),
    (
        {"scope": "tensor", "clip": 1.0},
        "reducer sparse selector micro (agreed), rank 1 reducer sparse selector per_tensor",
    ),
    ({"clip": 1.0}, "clip=None, rank 1 clip=1.0"),
    ({"lane": "caller"}, "lane=thread, rank 1 lane=caller"),
    ({"scaler": torch.amp.GradScaler("cpu")}, "scaler=none, rank 1 scaler=used"),
]


def attach_with_another_setting_on_rank_1() -> list[str]:
    model = wrapped()
    words = []
    for other, _ in DIFFERENT:
        given: dict[str, Any] = {"reducer": MICRO} | (other if dist.get_rank() == 1 else {})
        words.append(words_of(ValueError, lambda given=given: micro.attach(model, **given)))  # type: ignore[misc]
    micro.attach(model, MICRO)
    return words


def test_settings_that_differ_between_ranks_are_refused() -> None:
    expected = [f"settings must be the same on all ranks, rank 0 has {words}" for _, words in DIFFERENT]
    assert ranks(2).run(attach_with_another_setting_on_rank_1) == [expected] * 2


def seconds_to_join() -> float:
    """Return how long this rank takes to make a group that rank 1 is slow to join."""
    make = private_comm._new_group_like

    def make_late(*args: Any) -> dist.ProcessGroup:
        made = make(*args)
        time.sleep(0.3)
        return made

    dist.barrier()
    started = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(private_comm, "_new_group_like", make_late)
        private_comm.PrivateComm(None, torch.device("cpu")).close()
    return time.perf_counter() - started


def test_no_rank_has_the_new_group_before_all_have_joined_it() -> None:
    assert min(ranks(2).run(seconds_to_join)) > 0.25


def test_what_one_rank_refuses_all_ranks_refuse() -> None:
    first, second = ranks(2).run(refuse_on_rank_1)
    assert second == "clip must be positive, got -1.0: leave it out to disable clipping"
    assert first == f"rank 1 refused micro.attach: {second}"


def train_at(scales: tuple[float, float]) -> str:
    """Return what a backward raises where the ranks' scalers have these scales."""
    model, scaler = wrapped(), torch.amp.GradScaler("cpu", init_scale=scales[dist.get_rank()])
    with micro.attach(model, MICRO, scaler=scaler):
        return words_of(ValueError, lambda: scaler.scale(next(one_loss(model, 0))).backward())


def scales_of_a_rank_that_has_joined() -> tuple[float, float]:
    """Return the scale of what is kept, and that of the rank's own scaler, which grows with each of its steps."""
    model, scaler = wrapped(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = micro.attach(model, MICRO, scaler=scaler)
    with model.join():
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            scaler.scale(next(one_loss(model, step))).backward()
            scaler.step(optimizer)
            scaler.update()
    return float(attachment.state_dict()["loss_scale"]), scaler.get_scale()


def test_scales_that_differ_between_ranks_are_refused_on_all() -> None:
    words = "scale of the GradScaler must be the same on all ranks, got 4 on rank 0 and 8 on rank 1: "
    assert all(found.startswith(words) for found in ranks(2).run(train_at, (4.0, 8.0)))


def test_what_a_joined_rank_keeps_follows_the_scale_of_the_others() -> None:
    assert ranks(2).run(scales_of_a_rank_that_has_joined) == [(32.0, 16.0), (32.0, 64.0)]


@pytest.mark.parametrize("kind", ["made", "own", "model"])
@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (fail_in_the_reducer, "LookupError: words of its own"),
        (fail_between_collectives, "InjectedError: in AllGatherLists"),
        (fail_in_backward, "LookupError: backward fails"),
    ],
)
def test_a_failure_on_one_rank_ends_all_soon(
    fails: Callable[[str, dist.ProcessGroup | None], tuple[str, float]], words: str, kind: str
) -> None:
    (peer, after_s), (failed, _) = ranks(2).run(ends, fails, kind)
    assert failed == words
    assert peer == f"PeerError: rank 1 failed: {failed}"
    assert after_s < SOON_S
