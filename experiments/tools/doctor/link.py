"""Predict whether sparsifying pays, from a link and a selection measured on two ranks of this machine."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import micro
import models
from experiments.config import ROOT
from experiments.config.errors import as_user_error
from experiments.planning.costs import Flat, Link, scaled
from experiments.planning.tables import Curve
from experiments.planning.traces import Trace
from experiments.reports.names import human, label
from experiments.tools.doctor.findings import Finding, either
from experiments.tools.profile.link import measure_op
from experiments.tools.profile.select import own_seconds
from experiments.tools.ranks.group import RankGroup
from experiments.tools.simulate.method_choices import DENSE, MEMORY_GB_S, Methods, methods_of
from experiments.tools.simulate.networks import load_measured
from experiments.tools.simulate.steps import simulate_step
from micro.comm.group import GroupComm
from micro.predicted_traffic import calls_of

RANKS, TIMEOUT_S = 2, 100  # most of the time is for compiling kernels
MODEL, SIZES_OF_DATA = "resnet18", {"in_channels": 3, "num_classes": 10}
DENSITY = 0.01
SIZES = [64, 2**12, 2**16, 2**20, 2**22, 2**24]  # vectors, in bytes
REPEATS, SECONDS = 16, 3.0  # repeats per size, and the most seconds for all
STEPS = 5  # number of reductions, after a warm-up
TRACE = ROOT / "results/published/traces/resnet18.json"
METHODS = (DENSE, "powersgd", "topk", "oktopk", "micro")
ASSUMED = (
    "each worker has its own link, ring all-reduce, no overlap with backward; for GPUs and for links between machines "
    "use python -m experiments.profile link and select"
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of two ranks.

    Attributes:
        numel: elements of the reduced gradient.
        link: fitted to their all-reduces of several sizes.
        select_s: seconds of MiCRO's reduction of that gradient without collectives, on the slower rank.
    """

    numel: int
    link: Link
    select_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The time of a reduction of one model's gradient on one link, without overlap.

    Attributes:
        bits_per_s: rate of sending and summing.
        dense_s: time of a dense ring all-reduce.
        sparse_s: time of MiCRO: computation as measured here, plus its collectives.
        break_even_bits_per_s: MiCRO is faster below this rate, at this latency; 0: never, infinite: always.
    """

    numel: int
    world_size: int
    bits_per_s: float
    dense_s: float
    sparse_s: float
    break_even_bits_per_s: float


def measured_pair() -> Measured:
    """Start two ranks and return their measurements. Raises: GroupError: one failed, or they took too long."""
    with RankGroup(RANKS, env={"OMP_NUM_THREADS": "1"}, collective_s=TIMEOUT_S) as ranks:
        found: Measured = ranks.call(measure, timeout_s=TIMEOUT_S)[0]
    return found


def measure() -> Measured:
    """Time all-reduces of several sizes, and MiCRO's reduction of a model's gradient; call it on both ranks."""
    points = measure_op("all_reduce", SIZES, GroupComm(), torch.device("cpu"), REPEATS, SECONDS)
    curve = Curve(sizes=tuple(size for size, _ in points), seconds=tuple(seconds for _, seconds in points))
    with torch.device("meta"):  # only the shapes are needed
        numel = sum(p.numel() for p in models.build(MODEL, sizes=SIZES_OF_DATA).parameters())
    select_s = own_seconds("micro", numel, DENSITY, STEPS)
    return Measured(numel, scaled(curve.alpha_s, curve.beta_s, RANKS), select_s)


def link(
    rates_mbit: Sequence[float], latency_us: float | None, world_size: int, trace: Path | None
) -> Iterator[Finding]:
    """Yield the measurements of two ranks, conclusions for their link and for given rates, and predicted steps.

    Args:
        latency_us: of those links; by default this machine's.
        trace: profile of a model from `experiments.profile backward`; by default a published one.
    """
    measured = measured_pair()
    here, between = measured.link, f"between {RANKS} gloo ranks on this machine"
    alpha_s = here.alpha_s if latency_us is None else latency_us / 1e6
    links = {"this machine": here} | {human_rate(1e6 * rate): Link(alpha_s, 8 / (1e6 * rate)) for rate in rates_mbit}
    yield Finding("latency", f"{1e6 * here.alpha_s:.3g} us", f"a message, {between}")
    yield Finding("bandwidth", human_rate(_rate(here)), f"of an all-reduce {between}")
    note = f"MiCRO at density {DENSITY:g} on {measured.numel:,} numbers, {RANKS} ranks, CPU"
    yield Finding("selection", f"{1e3 * measured.select_s:.3g} ms", note)
    for name, each in links.items():
        found = compare(each, measured, world_size)
        pays = found.sparse_s < found.dense_s
        yield either(name, pays, "can pay" if pays else "cannot pay", _in_words(found, measured), **asdict(found))
    yield Finding("assumptions", "", ASSUMED)
    if world_size > 1:
        yield from predicted_steps(links, world_size, trace)


def compare(link: Link, measured: Measured, world_size: int) -> Comparison:
    """Compare MiCRO with dense for ``world_size`` workers, each with its own link of this kind.

    Both times are linear in the seconds per byte, which gives the break-even. The selection was measured with two
    workers; with more, each searches less.
    """
    calls = calls_of(micro.SparseReducer(micro.Micro(), density=DENSITY), measured.numel, world_size)

    def seconds(link: Link) -> tuple[float, float]:
        network = Flat(link, world_size)
        return network.seconds("all_reduce", 4 * measured.numel), sum(network.seconds(*call) for call in calls)

    dense_s, exchange_s = seconds(link)
    (dense_start_s, start_s), (dense_bytes, num_bytes) = seconds(Link(link.alpha_s, 0.0)), seconds(Link(0.0, 1.0))
    later_s, fewer_bytes = measured.select_s + start_s - dense_start_s, dense_bytes - num_bytes
    return Comparison(
        numel=measured.numel,
        world_size=world_size,
        bits_per_s=_rate(link),
        dense_s=dense_s,
        sparse_s=measured.select_s + exchange_s,
        break_even_bits_per_s=0.0 if fewer_bytes <= 0 else 8 * fewer_bytes / later_s if later_s > 0 else math.inf,
    )


def predicted_steps(links: Mapping[str, Link], world_size: int, trace: Path | None) -> Iterator[Finding]:
    """Yield for each link the seconds of a step with each of METHODS, predicted as by `experiments.simulate`.

    Dense uses DDP's buckets, the others one: the defaults of training.

    Raises:
        UserError: the profile cannot be used.
    """
    if trace is None and not TRACE.exists():
        yield Finding("steps", "unknown", "give a profile with --trace; only a clone has a published one", "absent")
        return
    profile = load_measured(Trace, trace or TRACE)
    methods, selection = methods_of(METHODS, DENSITY, table=None, memory_gb_s=MEMORY_GB_S)
    for name, each in links.items():
        with as_user_error(before=f"{trace or TRACE}: "):
            steps = {method: _step_s(methods, method, profile, Flat(each, world_size)) for method in METHODS}
        first = min(steps, key=lambda method: steps[method])
        words = ", ".join(f"{label(method)} {_in_ms(seconds)}" for method, seconds in steps.items())
        yield either(f"step, {name}", first != DENSE, label(first), words, first=first, steps_s=steps)
    note = f"{human(profile.model)}, density {DENSITY:g}, {world_size} workers; selection by {selection}"
    yield Finding("steps of", "", f"{note}. What a method costs in accuracy: docs/choosing.md")


def _step_s(methods: Methods, method: str, trace: Trace, network: Flat) -> float:
    problem, schedule = methods.problem(trace, network, method), "ddp" if method == DENSE else "single"
    return float(simulate_step(problem, schedule, network.world_size)["step_s"])


def human_rate(bits_per_s: float) -> str:
    """Return a rate with a suitable unit: ``100 Mbit/s``."""
    if math.isinf(bits_per_s):
        return "any rate"
    return f"{bits_per_s / 1e9:.3g} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.3g} Mbit/s"


def _in_words(found: Comparison, measured: Measured) -> str:
    if found.world_size == 1:
        return "One worker sends nothing: nothing to save."
    dense, sparse, select = map(_in_ms, (found.dense_s, found.sparse_s, measured.select_s))
    return (
        f"The gradient of {MODEL} among {found.world_size} workers: dense all-reduce {dense}, MiCRO at density "
        f"{DENSITY:g} {sparse} ({select} to select). It pays {_below(found.break_even_bits_per_s)}."
    )


def _in_ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _below(rate: float) -> str:
    return "at any rate" if math.isinf(rate) else f"below {human_rate(rate)}" if rate else "at no rate"


def _rate(link: Link) -> float:
    return 8 / link.beta_s if link.beta_s else math.inf
