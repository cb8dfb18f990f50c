"""attach() on real ranks: what DDP may do to gradients and buckets, and what must hold whatever it does."""

import io
import runpy
from collections.abc import Iterator
from contextlib import redirect_stdout
from difflib import ndiff
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.comm.group import GroupComm
from micro.reducers.base import saved_layout
from tests.dist.ddp_steps import (
    DENSE,
    MICRO,
    TINY_MB,
    TOPK,
    HalfNet,
    MixedNet,
    Net,
    TiedNet,
    accumulated,
    alike,
    batch,
    build,
    ddp_gradients,
    flat,
    keep_books,
    local_gradients,
    one_loss,
    some_unused,
    two_backwards,
    two_forwards,
    two_used,
    words_of,
    wrap,
)
from tests.dist.on_ranks import of_all, on_ranks, the_same
from tests.dist.processes import ranks
from tests.sparsifiers import TABLE

SCRIPTS = Path(__file__).parent / "scripts"
NEW_LINES = [
    "import micro",
    "    reducer = micro.SparseReducer(micro.Micro(), density=0.01)",
    "    micro.attach(model, reducer)",
]
ROWS = {row.name: row for row in TABLE}  # a row holds functions without a name, which do not travel to a process
REDUCERS = {"topk": TOPK, "micro": MICRO, "dense": DENSE}
SMALL: dict[str, Any] = {"bucket_cap_mb": TINY_MB}
VIEWS, STATIC = SMALL | {"gradient_as_bucket_view": True}, SMALL | {"static_graph": True}

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


def poisoned(model: nn.Module, step: int) -> Iterator[Tensor]:
    """At step 2, the last rank adds a NaN to the gradient of layer 1's bias."""
    x = model(batch(step)).square().sum()
    bad = step == 2 and dist.get_rank() == dist.get_world_size() - 1
    bias = next(p for name, p in model.named_parameters() if name.endswith("layers.1.bias"))
    yield x + (bias.sum() * float("nan") if bad else 0)


def larger_on_rank_1(model: nn.Module, step: int) -> Iterator[Tensor]:
    for loss in one_loss(model, step):
        yield loss * 10.0 ** dist.get_rank()


class Wide(nn.Module):
    """Three layers of 13.7 MB: two fill a bucket of the size that DDP takes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1850, 1850, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x.float(), (0, 1842), value=1.0)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


UNUSED = {"find_unused_parameters": True}
BOOKS: dict[str, tuple[Any, ...]] = {  # ranks, and what keep_books takes
    "one bucket": (2, Net, one_loss, MICRO, {}),
    "small buckets": (2, Net, one_loss, MICRO, SMALL),
    "views": (2, Net, one_loss, MICRO, VIEWS),
    "static graph": (2, Net, one_loss, MICRO, STATIC),
    "static graph, some unused": (2, Net, two_used, TOPK, STATIC),
    "accumulated": (2, Net, accumulated, TOPK, VIEWS),
    "two backwards": (2, Net, two_backwards, TOPK, VIEWS),
    "two forwards": (2, Net, two_forwards, TOPK, VIEWS),
    "tied": (2, TiedNet, one_loss, MICRO, VIEWS),
    "some unused, topk": (2, Net, some_unused, TOPK, UNUSED),
    "some unused, micro": (3, Net, some_unused, MICRO, UNUSED),
    "some unused, dense": (2, Net, some_unused, DENSE, UNUSED),
    "by tensor": (2, Net, one_loss, TOPK, SMALL, "tensor"),
    "by tensor, some unused": (2, Net, some_unused, TOPK, SMALL | UNUSED, "tensor"),
    "whole model": (2, Net, one_loss, MICRO, SMALL, "model"),
    "whole model, some unused": (2, Net, some_unused, MICRO, SMALL | UNUSED, "model"),
}


@pytest.mark.parametrize("name", BOOKS)
def test_nothing_of_a_gradient_is_lost(name: str) -> None:
    world_size, *case = BOOKS[name]
    answers = ranks(world_size).run(keep_books, *case)
    for given, booked, _ in answers:
        torch.testing.assert_close(booked, given, rtol=1e-10, atol=1e-12)
    assert len({str(buckets) for _, _, buckets in answers}) == 1, "ranks have different buckets"
    buckets = answers[0][2]
    assert name not in ("small buckets", "views", "static graph") or buckets[0] != buckets[-1], "none was rebuilt"


@pytest.mark.slow
@on_ranks(2)
def test_nothing_is_lost_in_buckets_of_the_usual_size_by_ranks_with_other_numbers_of_threads() -> None:
    torch.set_num_threads(1 + dist.get_rank())
    try:
        given, booked, buckets = keep_books(Wide, one_loss, MICRO, {})
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(booked, given, rtol=1e-5, atol=1e-4)
    assert len(buckets[-1]) == 2


@pytest.mark.parametrize("method", ROWS)
@on_ranks(2)
def test_hook_equals_the_plain_loop_for_every_method(method: str) -> None:
    """The plain loop reduces buckets when all gradients are computed; the hook does so during backward."""
    reducer, comm = ROWS[method].make(0.05, 0), GroupComm()
    ddp, attachment = wrap(build(Net), reducer, timed=True, **SMALL)
    states: dict[tuple[str, ...], Any] = {}
    for step in range(4):
        local = local_gradients(ddp.module, one_loss, step)
        got = ddp_gradients(ddp, one_loss, step)
        layouts = [saved_layout(bucket) for bucket in attachment.state_dict()["buckets"]]
        states = {
            layout.names: states.get(layout.names)
            or reducer.rebuild(layout, list(states.values()), torch.float64, torch.device("cpu"))
            for layout in layouts
        }
        for layout in layouts:
            grad = layout.flatten(local)
            comm.begin_step()
            reducer.reduce_(states[layout.names], grad, comm)
            assert torch.equal(grad, layout.flatten(got))


@pytest.mark.parametrize(
    ("world_size", "settings", "net"),
    [(2, {}, Net), (2, SMALL, Net), (2, VIEWS, Net), (2, STATIC, Net), (3, {}, HalfNet)],
)
@on_ranks()
def test_dense_equals_ddp_without_a_hook(world_size: int, settings: dict[str, Any], net: type[nn.Module]) -> None:
    """Bit for bit at two ranks and in half precision. Elsewhere DDP multiplies by 1/n and adds, we add and divide."""
    hooked, _ = wrap(build(net), DENSE, **settings)
    assert alike(hooked, DistributedDataParallel(build(net), **settings), one_loss, range(3))


@pytest.mark.parametrize("settings", [{}, STATIC], ids=["one bucket", "static graph"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_nothing_is_lost_of_mixed_dtypes_but_the_rounding_of_updates(reducer: str, settings: dict[str, Any]) -> None:
    answers = ranks(3).run(keep_books, MixedNet, one_loss, REDUCERS[reducer], settings)
    for given, booked, _ in answers:
        assert given.keys() == booked.keys()
        narrow = 1e-2 if reducer == "dense" else 1e-5  # which keeps no residual
        for name, rtol in (("wide.weight", 1e-10), ("single.weight", 1e-5), ("narrow.weight", narrow), ("scale", 1e-5)):
            scale = float(given[name].abs().max())
            torch.testing.assert_close(booked[name], given[name], rtol=rtol, atol=rtol * scale)


@on_ranks(2)
def test_an_optimizer_sharded_over_ranks_steps_like_a_whole_one() -> None:
    """ZeRO-1: each rank updates its share of the parameters and sends it to the others."""
    (sharded, _), (whole, _) = wrap(build(Net), MICRO, **SMALL), wrap(build(Net), MICRO, **SMALL)
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.Adam, lr=0.01)
    for model, stepping in ((sharded, optimizer), (whole, torch.optim.Adam(whole.parameters(), lr=0.01))):
        for step in range(4):
            ddp_gradients(model, one_loss, step)
            stepping.step()
    assert all(map(torch.equal, sharded.parameters(), whole.parameters()))


@pytest.mark.parametrize("reducer", REDUCERS)
@on_ranks(2)
def test_a_nan_stops_all_ranks_with_the_same_words_and_they_go_on(reducer: str) -> None:
    ddp, attachment = wrap(build(Net), REDUCERS[reducer], **VIEWS)
    for step in range(2):
        ddp_gradients(ddp, poisoned, step)
    words = the_same(words_of(micro.NonFiniteGradient, lambda: ddp_gradients(ddp, poisoned, 2)))
    assert "'layers.1.bias'" in words
    assert "not finite at step 2" in words
    assert ("on rank 1" in words) == (reducer != "dense")
    assert "\n" not in words
    after = flat(ddp_gradients(ddp, poisoned, 3))
    assert after.isfinite().all()
    assert after.any()
    assert [stats.step for stats in attachment.stats] == [3] * len(attachment.state_dict()["buckets"])


@on_ranks(2)
def test_an_overflow_on_one_rank_lowers_the_scale_of_all() -> None:
    ddp, scaler = DistributedDataParallel(build(Net), **SMALL), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, seen = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9), []
    with micro.attach(ddp, MICRO, scaler=scaler) as attachment:
        for step in range(5):
            optimizer.zero_grad()
            for loss in poisoned(ddp, step):
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), attachment.skipped))
    assert seen == [(2.0**10, False), (2.0**10, False), (2.0**9, True), (2.0**9, False), (2.0**9, False)]
    assert the_same(torch.cat([p.detach().flatten() for p in ddp.parameters()])).isfinite().all()


@pytest.mark.parametrize("members", [[0], [0, 2]])
@on_ranks(3)
def test_ranks_outside_the_model_are_not_waited_for(members: list[int]) -> None:
    if dist.get_rank() not in members:
        # torch counts the groups of each process; before 2.14 the attachment's too
        for _ in range(1 if torch.__version__ >= "2.14" else 2):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return
    group = dist.new_group(members, use_local_synchronization=True)
    ddp, attachment = wrap(build(Net), micro.SparseReducer(micro.Micro(), density=1.0), process_group=group)
    local, got = local_gradients(ddp.module, one_loss, 0), ddp_gradients(ddp, one_loss, 0)
    for name, grad in local.items():
        dist.all_reduce(grad, group=group)
        torch.testing.assert_close(got[name], grad / len(members))
    assert (sum(stats.bytes_sent for stats in attachment.stats) == 0) == (len(members) == 1)


@on_ranks(2)
def test_all_ranks_clip_by_the_root_mean_square_of_their_norms() -> None:
    """The mean keeps its direction, and its norm is at most the limit: not the limit, as where it were known."""
    limit, model = 0.1, DistributedDataParallel(build(Net), **SMALL)
    rows = torch.stack(of_all(flat(local_gradients(build(Net), larger_on_rank_1, 0))))
    with micro.attach(model, DENSE, clip=limit, clip_norm="global") as attachment:
        update = flat(ddp_gradients(model, larger_on_rank_1, 0))
    torch.testing.assert_close(update, rows.mean(0) * limit / rows.square().sum(1).mean().sqrt())
    assert float(update.norm()) <= limit
    assert sum(stats.counts_bytes for stats in attachment.stats) == 8, "one number all-reduced: 16 (n - 1) / n bytes"


# The scripts of the README


def losses_of(script: str) -> list[float]:
    """Run a script as torchrun runs it; return the losses that this rank prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        runpy.run_path(script, run_name="__main__")
    return [float(line.split()[-1]) for line in out.getvalue().splitlines() if line.startswith("step")]


def test_attaching_takes_these_lines_alone_and_the_script_trains() -> None:
    plain, sparse = ((SCRIPTS / name).read_text().splitlines() for name in ("plain_ddp.py", "sparse_ddp.py"))
    changes = [line for line in ndiff(plain, sparse) if line[0] != " " and line[2:]]
    assert changes == [f"+ {line}" for line in NEW_LINES]
    losses, silent = ranks(2).run_apart(losses_of, str(SCRIPTS / "sparse_ddp.py"))
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 5
    assert silent == []
