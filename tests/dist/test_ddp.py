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
from micro.group_comm import GroupComm
from micro.reducers.base import saved_layout
from tests.dist.ddp_steps import (
    DENSE,
    MICRO,
    TINY_MB,
    TOPK,
    HalfNet,
    Losses,
    MixedNet,
    Net,
    TiedNet,
    accumulated,
    batch,
    build,
    ddp_gradients,
    device,
    keep_books,
    local_gradients,
    named,
    one_loss,
    residuals,
    some_unused,
    two_backwards,
    two_forwards,
    two_used,
    words_of,
    wrap,
)
from tests.dist.processes import Ranks, ranks
from tests.saving import through_a_file
from tests.sparsifiers import TABLE

SCRIPTS = Path(__file__).parent / "scripts"
NEW_LINES = [
    "import micro",
    "    reducer = micro.SparseReducer(micro.Micro(), density=0.01)",
    "    micro.attach(model, reducer)",
]
ROWS = {row.name: row for row in TABLE}  # a row holds functions without a name, which do not travel to a process
REDUCERS = {"topk": TOPK, "micro": MICRO, "dense": DENSE}

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# What runs on the ranks


def hook_and_loop(method: str, timed: bool = True) -> list[bool]:
    """Return, per step, whether the hook and a loop that calls reduce_ gave the same bits."""
    reducer = ROWS[method].make(0.05, 0)
    ddp, attachment = wrap(build(Net), reducer, timed=timed, bucket_cap_mb=TINY_MB)
    comm = GroupComm()
    states: dict[tuple[str, ...], Any] = {}
    same = []
    for step in range(4):
        local = local_gradients(ddp.module, one_loss, step)
        got = ddp_gradients(ddp, one_loss, step)
        layouts = [saved_layout(bucket) for bucket in attachment.state_dict()["buckets"]]
        states = {
            layout.names: states.get(layout.names)
            or reducer.rebuild(layout, list(states.values()), torch.float64, device())
            for layout in layouts
        }
        for layout in layouts:
            flat = layout.flatten(local)
            comm.begin_step()
            reducer.reduce_(states[layout.names], flat, comm)
            same.append(torch.equal(flat, layout.flatten(got)))
    return same


def dense_beside_ddp(settings: dict[str, Any], net: type[nn.Module] = Net) -> list[bool]:
    """Return, per step, whether the dense reducer and DDP without a hook gave the same bits."""
    hooked, _ = wrap(build(net), DENSE, **settings)
    bare = DistributedDataParallel(build(net), **settings)
    same = []
    for step in range(3):
        mine, theirs = ddp_gradients(hooked, one_loss, step), ddp_gradients(bare, one_loss, step)
        same.append(all(torch.equal(mine[name], theirs[name]) for name in mine))
    return same


def weights_by(optimizer: type[torch.optim.Optimizer], **settings: Any) -> dict[str, Tensor]:
    """Return the weights after some steps of an optimizer on gradients reduced by MiCRO."""
    ddp, _ = wrap(build(Net), MICRO, bucket_cap_mb=TINY_MB)
    stepping = optimizer(ddp.parameters(), lr=0.01, **settings)
    for step in range(4):
        ddp_gradients(ddp, one_loss, step)
        stepping.step()
    return {name: parameter.detach().clone() for name, parameter in named(ddp.module).items()}


def sharded_and_whole_optimizer() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    sharded = weights_by(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam)
    return sharded, weights_by(torch.optim.Adam)


def resume(settings: dict[str, Any]) -> tuple[list[bool], list[bool]]:
    """Go on in a fresh DDP from a saved state.

    Returns:
        whether each residual came back as it was; whether each later step gave the bits of the uninterrupted run.
    """
    reducer = micro.SparseReducer(micro.TopK(), density=0.1)
    ddp, attachment = wrap(build(Net), reducer, **settings)
    for step in range(3):
        ddp_gradients(ddp, one_loss, step)
    saved = through_a_file(attachment.state_dict())
    fresh, loaded = wrap(build(Net), reducer, **settings)
    loaded.load_state_dict(saved)
    before, after = residuals(attachment.state_dict()), residuals(loaded.state_dict())
    came_back = [torch.equal(before[name], after[name]) for name in named(ddp.module)]
    same = []
    for step in range(3, 6):
        mine, theirs = ddp_gradients(ddp, one_loss, step), ddp_gradients(fresh, one_loss, step)
        same.append(all(torch.equal(mine[name], theirs[name]) for name in mine))
        same.append([stats.step for stats in loaded.stats] == [step] * len(loaded.stats))
    return came_back, same


def poisoned(model: nn.Module, step: int) -> Iterator[Tensor]:
    """At step 2, rank 1 (the only rank, if there is one) adds a NaN to the gradient of layer 1's bias."""
    x = model(batch(step)).square().sum()
    bad = step == 2 and dist.get_rank() == min(1, dist.get_world_size() - 1)
    bias = next(p for name, p in model.named_parameters() if name.endswith("layers.1.bias"))
    yield x + (bias.sum() * float("nan") if bad else 0)


def stop_at_nan(reducer: micro.Reducer, settings: dict[str, Any]) -> tuple[str, bool]:
    """Return the words of the error, and whether the model can be trained on."""
    ddp, attachment = wrap(build(Net), reducer, **settings)
    for step in range(2):
        ddp_gradients(ddp, poisoned, step)
    words = words_of(micro.NonFiniteGradient, lambda: ddp_gradients(ddp, poisoned, 2))
    flat = torch.cat([grad.flatten() for grad in ddp_gradients(ddp, poisoned, 3).values()])
    went_on = bool(flat.isfinite().all()) and bool(flat.any())
    steps = [stats.step for stats in attachment.stats]
    return words, went_on and steps == [3] * len(attachment.state_dict()["buckets"])


def scaled_losses() -> tuple[list[float], list[bool], list[Tensor]]:
    """Train with a scaler; at step 2 the gradient of the last rank overflows.

    Returns:
        the scale and whether the step was skipped, after each step; the weights at the end.
    """
    ddp = DistributedDataParallel(build(Net), bucket_cap_mb=TINY_MB)
    scaler = torch.amp.GradScaler(device().type, init_scale=2.0**10)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    scales, skipped = [], []
    with micro.attach(ddp, MICRO, scaler=scaler) as attachment:
        for step in range(5):
            optimizer.zero_grad()
            for loss in poisoned(ddp, step):
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            skipped.append(attachment.skipped)
    return scales, skipped, [p.detach().cpu() for p in ddp.parameters()]


def part_of_the_ranks(members: list[int]) -> bool:
    """Train on some ranks alone; return whether the update was the mean of their gradients."""
    if dist.get_rank() not in members:
        for _ in range(2):  # torch names groups by how many a process has made: keep the ranks even for later tests
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return True
    group = dist.new_group(members, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    ddp, attachment = wrap(build(Net), micro.SparseReducer(micro.Micro(), density=1.0), process_group=group)
    local, got = local_gradients(ddp.module, one_loss, 0), ddp_gradients(ddp, one_loss, 0)
    for name, grad in local.items():
        dist.all_reduce(grad, group=group)
        torch.testing.assert_close(got[name], grad / len(members))
    return (sum(stats.bytes_sent for stats in attachment.stats) == 0) == (len(members) == 1)


# The laws

ONCE = {
    "one bucket": {},
    "small buckets": {"bucket_cap_mb": TINY_MB},
    "views": {"bucket_cap_mb": TINY_MB, "gradient_as_bucket_view": True},
    "static graph": {"bucket_cap_mb": TINY_MB, "static_graph": True},
}


def check_books(group: Ranks, *args: Any) -> list[list[tuple[str, ...]]]:
    """Run keep_books, compare, and return the buckets' names after each step."""
    answers = group.run(keep_books, *args)
    for given, booked, _ in answers:
        torch.testing.assert_close(booked, given, rtol=1e-10, atol=1e-12)
    assert len({str(buckets) for _, _, buckets in answers}) == 1, "ranks have different buckets"
    names: list[list[tuple[str, ...]]] = answers[0][2]
    return names


@pytest.mark.parametrize("settings", ONCE)
def test_nothing_is_lost_when_buckets_are_rebuilt(settings: str) -> None:
    buckets = check_books(ranks(2), Net, one_loss, MICRO, ONCE[settings])
    if settings != "one bucket":
        assert buckets[0] != buckets[-1], "DDP rebuilt nothing: a test of nothing"


@pytest.mark.parametrize("losses", [accumulated, two_backwards, two_forwards])
def test_nothing_is_lost_however_backward_is_called(losses: Losses) -> None:
    check_books(ranks(2), Net, losses, TOPK, ONCE["views"])


def test_nothing_is_lost_of_a_tied_parameter() -> None:
    check_books(ranks(2), TiedNet, one_loss, MICRO, ONCE["views"])


@pytest.mark.parametrize(("world_size", "reducer"), [(2, TOPK), (3, MICRO), (2, DENSE)])
def test_nothing_is_lost_of_parameters_that_some_or_all_ranks_do_not_use(
    world_size: int, reducer: micro.Reducer
) -> None:
    check_books(ranks(world_size), Net, some_unused, reducer, {"find_unused_parameters": True})


def test_an_unused_parameter_of_a_static_graph_does_no_harm() -> None:
    check_books(ranks(2), Net, two_used, TOPK, ONCE["static graph"])


@pytest.mark.parametrize("name", ROWS)
def test_hook_equals_the_plain_loop_for_every_method(name: str) -> None:
    """The plain loop reduces bucket after bucket when all gradients are there; the hook while backward goes on."""
    for same in ranks(2).run(hook_and_loop, name):
        assert all(same)


@pytest.mark.parametrize("settings", ONCE)
def test_dense_equals_ddp_without_a_hook(settings: str) -> None:
    """Bit for bit at two ranks. Elsewhere to rounding: DDP multiplies by 1/n and adds, the reducer adds and divides."""
    assert ranks(2).run(dense_beside_ddp, ONCE[settings]) == [[True] * 3] * 2


def test_the_dense_reducer_divides_half_precision_where_ddp_does() -> None:
    assert ranks(3).run(dense_beside_ddp, {}, HalfNet) == [[True] * 3] * 3


@pytest.mark.parametrize("settings", ["one bucket", "static graph"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_nothing_is_lost_of_mixed_dtypes_but_the_rounding_of_updates(reducer: str, settings: str) -> None:
    answers = ranks(3).run(keep_books, MixedNet, one_loss, REDUCERS[reducer], ONCE[settings])
    for given, booked, _ in answers:
        assert given.keys() == booked.keys()
        narrow = 1e-2 if reducer == "dense" else 1e-5  # which keeps no residual
        for name, rtol in (("wide.weight", 1e-10), ("single.weight", 1e-5), ("narrow.weight", narrow), ("scale", 1e-5)):
            scale = float(given[name].abs().max())
            torch.testing.assert_close(booked[name], given[name], rtol=rtol, atol=rtol * scale)


def test_an_optimizer_sharded_over_ranks_steps_like_a_whole_one() -> None:
    """ZeRO-1: each rank updates its share of the parameters and sends it to the others."""
    for sharded, whole in ranks(2).run(sharded_and_whole_optimizer):
        torch.testing.assert_close(sharded, whole, rtol=0, atol=0)


def test_state_goes_into_a_fresh_model() -> None:
    for came_back, same in ranks(2).run(resume, {}):
        assert all(came_back)
        assert all(same), "one bucket selects over the same vector, so the runs must agree bit for bit"


@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_nan_stops_all_ranks_with_the_same_words(reducer: str) -> None:
    answers = ranks(2).run(stop_at_nan, REDUCERS[reducer], ONCE["views"])
    assert len({words for words, _ in answers}) == 1
    words, went_on = answers[0]
    assert "'layers.1.bias'" in words
    assert "not finite at step 2" in words
    assert ("on rank 1" in words) == (reducer != "dense")
    assert "\n" not in words
    assert went_on


def test_an_overflow_on_one_rank_lowers_the_scale_of_all() -> None:
    for scales, skipped, weights in (answers := ranks(2).run(scaled_losses)):
        assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**9]
        assert skipped == [False, False, True, False, False]
        assert all(map(torch.equal, weights, answers[0][2]))
        assert all(weight.isfinite().all() for weight in weights)


@pytest.mark.parametrize("members", [[0], [0, 2]])
def test_ranks_outside_the_model_are_not_waited_for(members: list[int]) -> None:
    assert ranks(3).run(part_of_the_ranks, members) == [True] * 3


# The scripts of the README


def losses_of(script: str) -> list[float]:
    """Run a script as torchrun runs it; return the losses that this rank prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        runpy.run_path(script, run_name="__main__")
    return [float(line.split()[-1]) for line in out.getvalue().splitlines() if line.startswith("step")]


def test_attaching_takes_these_lines_alone() -> None:
    plain, sparse = ((SCRIPTS / name).read_text().splitlines() for name in ("plain_ddp.py", "sparse_ddp.py"))
    changes = [line for line in ndiff(plain, sparse) if line[0] != " " and line[2:]]
    assert changes == [f"+ {line}" for line in NEW_LINES]


def test_the_script_trains() -> None:
    losses, silent = ranks(2).run_apart(losses_of, str(SCRIPTS / "sparse_ddp.py"))
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 5
    assert silent == []


# The same on GPUs, over NCCL where there are two. With one nothing travels: that tests the hook and its stream alone.


def gpus() -> Ranks:
    return ranks(min(2, torch.cuda.device_count()), "nccl")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("losses", [one_loss, accumulated])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_nothing_is_lost_on_gpus(reducer: str, losses: Losses) -> None:
    check_books(gpus(), Net, losses, REDUCERS[reducer], ONCE["views"])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("method", ["topk", "micro", "dense"])
def test_hook_equals_the_plain_loop_on_gpus(method: str, timed: bool) -> None:
    assert all(all(same) for same in gpus().run(hook_and_loop, method, timed))
