"""The life of an attachment among real ranks: it leaves nothing behind, and one rank's failure ends all."""

import gc
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import micro
from micro import private_comm
from tests.dist.ddp_steps import DENSE, MICRO, TINY_MB, Net, build, ddp_gradients, one_loss, words_of
from tests.dist.processes import COLLECTIVE_S, ranks
from tests.faults import Fault, Faulty, InjectedError

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
SOON_S = COLLECTIVE_S / 3


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


def fail_between_collectives(kind: str, group: dist.ProcessGroup | None) -> tuple[str, float]:
    """Fail in the middle of a step of a sparse method: what is kept is then neither gone on from nor saved."""
    reducer = Faulty(reducer=MICRO, fault=Fault("fails", rank=1, at=0, op="AllGatherLists"), step=1)
    model, attachment = attach_over(kind, group, Net, reducer)
    ddp_gradients(model, one_loss, 0)
    failed = how_it_ends(lambda: ddp_gradients(model, one_loss, 1))
    words_of(RuntimeError, attachment.state_dict).index("broke off (")
    attachment.close()
    if kind != "model":
        with micro.attach(model, DENSE):
            assert all(bool(grad.any()) for grad in ddp_gradients(model, one_loss, 2).values())
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


KEYS = ["density", "split", "per_tensor", "clip", "lane", "scaler"]
OTHER_DENSITY = micro.SparseReducer(micro.Micro(), density=0.2)
DIFFERENT: list[dict[str, Any]] = [  # what rank 1 has where rank 0 has the defaults
    {"reducer": OTHER_DENSITY},
    {"start_step": 3},
    {"scope": "tensor", "clip": 1.0},
    {"clip": 1.0},
    {"lane": "caller"},
    {"scaler": torch.amp.GradScaler("cpu")},
    {"clip": -1.0},  # which rank 1 refuses
]


def attach_with_another_setting_on_rank_1() -> list[str]:
    model = wrapped()
    words = []
    for other in DIFFERENT:
        given: dict[str, Any] = {"reducer": MICRO} | (other if dist.get_rank() == 1 else {})
        words.append(words_of(ValueError, lambda given=given: micro.attach(model, **given)))  # type: ignore[misc]
    micro.attach(model, MICRO)
    return words


def test_settings_that_differ_between_ranks_or_that_one_refuses_are_refused_on_all() -> None:
    (*first, refused), (*second, own) = ranks(2).run(attach_with_another_setting_on_rank_1)
    assert first == second
    assert all("rank 0 has " in words and ", rank 1 " in words for words in first)
    assert all(key in words for key, words in zip(KEYS, first, strict=True))
    assert "clip" in own
    assert refused == f"rank 1 refused micro.attach: {own}"


def seconds_to_join() -> float:
    """Return how long this rank takes to make a group that rank 1 is slow to join."""
    make, dist_rank = private_comm._new_group_like, dist.get_rank()

    def make_late(*args: Any) -> dist.ProcessGroup:
        made = make(*args)
        time.sleep(0.3 * dist_rank)
        return made

    dist.barrier()
    started = time.perf_counter()
    with patch.object(private_comm, "_new_group_like", make_late):
        private_comm.PrivateComm(None, torch.device("cpu")).close()
    return time.perf_counter() - started


def test_no_rank_has_the_new_group_before_all_have_joined_it() -> None:
    assert min(ranks(2).run(seconds_to_join)) > 0.25


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
    for words in ranks(2).run(train_at, (4.0, 8.0)):
        assert "got 4 on rank 0 and 8 on rank 1" in words


def test_what_a_joined_rank_keeps_follows_the_scale_of_the_others() -> None:
    assert ranks(2).run(scales_of_a_rank_that_has_joined) == [(32.0, 16.0), (32.0, 64.0)]


@pytest.mark.parametrize("kind", ["made", "own", "model"])
@pytest.mark.parametrize(
    ("fails", "words"),
    [
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
