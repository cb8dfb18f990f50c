"""Whether sparsifying can pay on a link: dense all-reduce against MiCRO's selection and exchange, without overlap."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import micro
from experiments.checkup.findings import Finding
from experiments.checkup.pair import WORLD_SIZE, Measured
from micro.planning import costs
from micro.planning.costs import Link
from micro.planning.tables import Curve
from micro.planning.volumes import calls_of

ELEMENT_BYTES = 4
ASSUMED = (
    "each worker has its own link, ring all-reduce, no overlap with backward; for GPUs and for links between machines "
    "use python -m experiments.profile link and select"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The time of a reduction of one model's gradient on one link.

    Attributes:
        bits_per_s: rate of sending and summing.
        dense_s: time of a dense ring all-reduce.
        sparse_s: time of MiCRO: of its computation as measured here, and of its collectives.
        break_even_bits_per_s: at this latency MiCRO takes less time below this rate; 0 if it never does, infinite if
            it always does.
    """

    numel: int
    world_size: int
    bits_per_s: float
    dense_s: float
    sparse_s: float
    break_even_bits_per_s: float

    @property
    def pays(self) -> bool:
        """Whether MiCRO takes less time than dense."""
        return self.sparse_s < self.dense_s


def measured_link(measured: Measured) -> Link:
    """Return the link that fits the measured times of the two ranks."""
    curve = Curve(sizes=tuple(measured.sizes), seconds=tuple(measured.seconds))
    return costs.scaled(curve.alpha_s, curve.beta_s, WORLD_SIZE)


def given_links(rates_mbit: Sequence[float], latency_us: float | None, here: Link) -> dict[str, Link]:
    """Return links of these rates by name, with the latency of ``here`` where none is given."""
    alpha_s = here.alpha_s if latency_us is None else latency_us / 1e6
    return {human_rate(1e6 * rate): Link(alpha_s, 8 / (1e6 * rate)) for rate in rates_mbit}


def findings(links: Mapping[str, Link], measured: Measured, world_size: int) -> Iterator[Finding]:
    """Yield what was measured, then a comparison for each link; the first is the measured one."""
    here = next(iter(links.values()))
    between = f"between {WORLD_SIZE} gloo ranks on this machine"
    yield Finding(name="latency", value=f"{1e6 * here.alpha_s:.3g} us", note=f"a message, {between}")
    yield Finding(name="bandwidth", value=human_rate(_rate(here)), note=f"of an all-reduce {between}")
    yield Finding(
        name="selection",
        value=f"{1e3 * measured.select_s:.3g} ms",
        note=f"MiCRO at density {measured.density:g} on {measured.numel:,} numbers, {WORLD_SIZE} ranks, CPU",
    )
    for name, link in links.items():
        comparison = compare(link, measured, world_size)
        yield Finding(
            name=name,
            value="can pay" if comparison.pays else "cannot pay",
            note=in_words(comparison, measured),
            state="here" if comparison.pays else "absent",
            data=asdict(comparison),
        )
    yield Finding(name="assumptions", value="", note=ASSUMED)


def compare(link: Link, measured: Measured, world_size: int) -> Comparison:
    """Compare MiCRO with dense for ``world_size`` workers, each with its own link of this kind.

    The time of the selection was measured with two workers; with more workers each of them searches less.
    """
    return Comparison(
        numel=measured.numel,
        world_size=world_size,
        bits_per_s=_rate(link),
        dense_s=_dense_s(link, measured, world_size),
        sparse_s=measured.select_s + _exchange_s(link, measured, world_size),
        break_even_bits_per_s=_break_even(link.alpha_s, measured, world_size),
    )


def in_words(comparison: Comparison, measured: Measured) -> str:
    """Return the comparison as a few sentences."""
    if comparison.world_size == 1:
        return "One worker sends nothing: there is nothing to save."
    times = (
        f"The gradient of {measured.model} among {comparison.world_size} workers: dense all-reduce "
        f"{_duration(comparison.dense_s)}, MiCRO at density {measured.density:g} {_duration(comparison.sparse_s)} "
        f"({_duration(measured.select_s)} to select)."
    )
    return f"{times} {_border(comparison.break_even_bits_per_s)}"


def human_rate(bits_per_s: float) -> str:
    """Return a rate with a suitable unit: ``100 Mbit/s``."""
    if math.isinf(bits_per_s):
        return "any rate"
    return f"{bits_per_s / 1e9:.3g} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.3g} Mbit/s"


def _rate(link: Link) -> float:
    return 8 / link.beta_s if link.beta_s else math.inf


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _border(rate: float) -> str:
    if rate == 0:
        return "It pays at no rate: it does not send fewer bytes."
    return f"It pays {'at any rate' if math.isinf(rate) else f'below {human_rate(rate)}'}."


def _dense_s(link: Link, measured: Measured, world_size: int) -> float:
    return costs.Flat(link, world_size).seconds("all_reduce", ELEMENT_BYTES * measured.numel)


def _exchange_s(link: Link, measured: Measured, world_size: int) -> float:
    reducer = micro.SparseReducer(micro.Micro(), density=measured.density)
    network = costs.Flat(link, world_size)
    return sum(network.seconds(op, size) for op, size in calls_of(reducer, measured.numel, world_size))


def _break_even(latency_s: float, measured: Measured, world_size: int) -> float:
    """Return the rate at which both take the same time; both times are linear in the seconds per byte."""
    start, byte = Link(latency_s, 0.0), Link(0.0, 1.0)
    later_s = measured.select_s + _exchange_s(start, measured, world_size) - _dense_s(start, measured, world_size)
    fewer_bytes = _dense_s(byte, measured, world_size) - _exchange_s(byte, measured, world_size)
    if fewer_bytes <= 0:
        return 0.0
    return 8 * fewer_bytes / later_s if later_s > 0 else math.inf
