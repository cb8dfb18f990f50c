"""Local steps over links of a known rate: forms of training on hosts, measured and simulated.

A form exchanges gradients at every step, adds them up over several, or exchanges differences of weights after rounds of
steps. Reports the seconds of one batch as a mean over whole rounds, so that an exchange counts once in its round; what
the kernel counted on the links beside what the method counts; and the seconds that the page on equal tokens simulates,
from the computation and the messages of the same steps. Needs root on Linux.

Each form trains at each rate for --rounds whole rounds and at least --batches batches, after some that do not count. A
line tells each form at each rate as it is done. A run that is stopped writes what it has.
"""

import argparse
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.benchmarks.network.links import (
    WARMUP,
    Links,
    add_link_options,
    check_words,
    linked_hosts,
    report,
)
from experiments.benchmarks.network.page import HOSTS, off
from experiments.benchmarks.network.rounds_training import begin_rounds, train_rounds
from experiments.benchmarks.tables import Column, Columns, table
from experiments.config.errors import UserError
from experiments.config.option_types import comma_list, whole_number
from experiments.config.schema import Flat, TrainConfig, flat
from experiments.ranks.hosts import bits_per_s
from experiments.ranks.measures import Row
from experiments.reports.names import human, label
from experiments.reports.rounds_in_words import exchanged, interval, outer, short
from experiments.reports.times import FRAME, LATENCY_S, exchange_s
from experiments.training.preflight import prepare_runs
from experiments.training.runner import num_steps

NAME = "network_rounds"
SETTLED = ("sparsifier", "rounds", "accumulate", "cluster", "output")
BASE = ["experiment=gpt_manuals", "cluster.num_threads=1", "measure_test_every=0", "output=unused", "cluster=local"]
SPECIAL = {  # what methods train with in the study of equal tokens
    "sparseloco": ["density=0.015625"],
    "sparseloco_published": ["density=0.015625"],
    "demo": ["optimizer=sign", "lr=0.001", "density=0.0078125"],
}
FORM = re.compile(r"(?P<method>\w+)(?:\+(?P<added>\d+)|:(?P<every>\d+)(?P<nesterov>:nesterov)?)?")
NESTEROV = ["rounds.lr=0.7", "rounds.momentum=0.9", "rounds.nesterov=true"]
CHOICES = (
    "dense,dense+5,dense:5,dense:30:nesterov,micro,micro:5,micro:30,topk:5,sparseloco_published:5,"
    "sparseloco_published:30,demo"
)
COLUMNS: Columns = {
    "method": Column("label"),
    "what is exchanged": Column("exchanged"),
    "batch s": Column("step_s", "{:.4g}"),
    "least": Column("least_s", "{:.3g}"),
    "most": Column("most_s", "{:.3g}"),
    "rounds": Column("num_rounds", "{:.0f}"),
    "times dense": Column("times_dense", "{:.2f}"),
    "compute s": Column("compute_s", "{:.3g}"),
    "link kB": Column("link_bytes", "{:.4g}", 1e-3),
    "counted kB": Column("counted_bytes", "{:.4g}", 1e-3),
    "link / counted": Column("link_share", "{:.3f}"),
    "simulated s": Column("predicted_s", "{:.4g}"),
    "measured / simulated": Column("measured_share", "{:.2f}"),
}
NOTES = f"""\
- *batch s*: seconds for each batch of a worker, of the slowest rank: the mean over whole rounds, so that an exchange
  after H steps counts once in H; with the round of the *least* and of the *most*. *times dense*: how much faster than
  dense training with an exchange at every step. *compute s*: forward and backward of a batch, the median over steps.
- *link kB*: payload per host and batch by the kernel's counters (headers taken off); *counted kB*: what the method
  counts itself.
- *simulated s*: as [the page on equal tokens](equal_tokens.md) has it: the computation of a batch, the median over
  all forms at this rate and the same for all, and what rank 0 sent, {1e6 * LATENCY_S:g} us a message of a ring and
  {FRAME:.4g} bytes on the wire for each. Nothing is hidden, and selection and the optimizer are not in it. Nor is that
  hosts share the machine's cores, and that a link that has rested lets its first packets pass at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_link_options(parser, hosts=4, settings="further settings of every form, as for train")
    add = parser.add_argument
    add(
        "--ways",
        type=comma_list(str),
        default=CHOICES,
        metavar="A,B",
        help="METHOD exchanges at every step, METHOD:H after rounds of H, METHOD:H:nesterov with such an outer "
        "optimizer, METHOD+N adds gradients up over N steps (%(default)s)",
    )
    add("--rounds", type=whole_number(), default=3, help="that count, at least (%(default)s)")
    add("--batches", type=whole_number(), default=30, help="of each worker that count, at least (%(default)s)")


@dataclass(frozen=True, slots=True)
class Way:
    """One form of training: a method, and how many batches of a worker lie between two exchanges.

    Attributes:
        words: of its configuration.
    """

    name: str
    config: TrainConfig
    words: list[str]

    @property
    def settings(self) -> Flat:
        """Its configuration by dotted keys."""
        return flat(asdict(self.config))

    @property
    def exchanged(self) -> str:
        """What its workers exchange, and by what outer optimizer."""
        return ", ".join(filter(None, (exchanged(self.settings), outer(self.settings))))

    @property
    def title(self) -> str:
        """How it is called in figures."""
        return f"{label(self.config.sparsifier.name)}, {short(self.settings) or self.exchanged}"

    @property
    def interval(self) -> int:
        """Batches of a worker in a round, 1 where every batch is followed by an exchange."""
        return interval(self.settings)

    @property
    def round_steps(self) -> int:
        """Steps of the training in a round: gradients that are added up are one step."""
        return self.interval // self.config.accumulate

    @property
    def warm_rounds(self) -> int:
        """Rounds that are not counted, at each rate."""
        return math.ceil(WARMUP / self.interval)

    def num_rounds(self, arguments: argparse.Namespace) -> int:
        """Return how many whole rounds are measured, at each rate."""
        return max(arguments.rounds, math.ceil(arguments.batches / self.interval))


def ways_of(arguments: argparse.Namespace) -> list[Way]:
    """Return the forms. Raises: UserError: a mistake, or a training that is too short."""
    check_words(arguments, SETTLED, "--ways and --hosts")
    names = list(dict.fromkeys(arguments.ways))
    words = [[*words_of(name), f"cluster.nproc_per_node={arguments.hosts}", *arguments.overrides] for name in names]
    configs = prepare_runs(words, joined_world_size=arguments.hosts)
    ways = [Way(*each) for each in zip(names, configs, words, strict=True)]
    for way in ways:
        needed = len(arguments.rates) * (way.warm_rounds + way.num_rounds(arguments)) * way.round_steps
        there = num_steps(way.config)
        if needed > there:
            raise UserError(
                f"{way.name}: {needed} steps are to be measured at all rates, the training has {there}: lower --rounds "
                f"or --batches, or add epochs={math.ceil(needed * way.config.epochs / there)}"
            )
    return ways


def words_of(name: str) -> list[str]:
    """Return the words of a form. Raises: UserError: it is none."""
    form = FORM.fullmatch(name)
    if form is None:
        raise UserError(f"--ways must be METHOD, METHOD:H, METHOD:H:nesterov or METHOD+N, got '{name}'")
    words = [*BASE, f"sparsifier={form['method']}", *SPECIAL.get(form["method"], [])]
    words += [f"accumulate={form['added']}"] if form["added"] else []
    words += [f"rounds.every={form['every']}"] if form["every"] else []
    return words + (NESTEROV if form["nesterov"] else [])


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the tables and the figure; a run that is stopped writes what is finished.

    Raises:
        UserError: a mistake, or a machine that can have no hosts; nothing is started then.
        RankFailure: a rank failed.
    """
    ways = ways_of(arguments)
    config = ways[0].config
    where = f"batch {config.batch_size} on each of {arguments.hosts} hosts"
    title = f"{human(config.model.name)} on {human(config.dataset.name)}, {where}"
    rows = _measured(arguments, ways, console)
    report(rows, "Local steps over links of a known rate", title, _page, arguments, console)


def _page(rows: pd.DataFrame, title: str) -> tuple[pd.DataFrame, Iterable[str]]:
    frame = compared(rows)
    return frame, blocks(frame, title)


def _measured(arguments: argparse.Namespace, ways: Sequence[Way], console: Console) -> Iterator[Row]:
    """Yield the row of each form at each rate, and print a line for it."""
    with linked_hosts(arguments.hosts, console) as links:
        for way in ways:
            links.hosts.shape(None)
            links.ranks.call(begin_rounds, way.words)
            for rate in arguments.rates:
                links.hosts.shape(rate)
                row = _measure(way, way.num_rounds(arguments), links, rate)
                yield row
                links.say(f"{rate}: {way.name}: {row['step_s']:.4g} s a batch, {row['link_bytes'] / 1e3:.4g} kB")


def _measure(way: Way, num_rounds: int, links: Links, rate: str) -> Row:
    """Train whole rounds over the links as they are shaped now; return what was seen, for each batch of a worker."""
    links.ranks.call(train_rounds, way.warm_rounds, way.round_steps)
    answers, sent = links.counted(train_rounds, num_rounds, way.round_steps)
    num_batches = num_rounds * way.interval
    return {
        "rate": rate,
        "way": way.name,
        "title": way.title,
        "label": label(way.config.sparsifier.name),
        "exchanged": way.exchanged,
        "num_rounds": num_rounds,
        **batch_seconds([answer["seconds"] for answer in answers], way.interval),
        "link_bytes": sent / num_batches,
        **of_steps([answer["steps"] for answer in answers], num_batches, way.config.accumulate, bits_per_s(rate)),
    }


def batch_seconds(rounds: Sequence[Sequence[float]], interval: int) -> dict[str, float]:
    """Return the seconds of a batch: the mean over rounds, the least and the most, each of its slowest rank.

    Args:
        rounds: for each rank the seconds of its rounds, which it took in a row.
    """
    slowest = [max(together) / interval for together in zip(*rounds, strict=True)]
    mean = max(sum(own) for own in rounds) / (len(slowest) * interval)
    return {"step_s": mean, "least_s": min(slowest), "most_s": max(slowest)}


def of_steps(
    steps: Sequence[Sequence[dict[str, Any]]], num_batches: int, batches: int, rate: float
) -> dict[str, float]:
    """Return for a batch what ranks computed and counted, and the seconds of rank 0's messages on a simulated link.

    Args:
        steps: for each rank the records of its steps.
        batches: of a worker in each step.
        rate: bits per second.
    """
    frames = [pd.DataFrame(own) for own in steps]
    calls = pd.to_numeric(frames[0]["num_collectives"]).fillna(0)
    on_link = exchange_s(frames[0]["bytes_sent"], calls, len(frames), rate)
    return {
        "compute_s": statistics.fmean(own["compute_s"].median() for own in frames) / batches,
        "counted_bytes": statistics.fmean(own["bytes_sent"].sum() for own in frames) / num_batches,
        "simulated_exchange_s": on_link.sum() / num_batches,
    }


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows by rate, with simulated seconds, and how they and the bytes agree with those measured."""
    rates = list(dict.fromkeys(frame["rate"]))
    frame = frame.sort_values("rate", key=lambda column: column.map(rates.index), kind="stable")
    dense = frame[frame["way"] == "dense"].set_index("rate")["step_s"]
    simulated = frame.groupby("rate")["compute_s"].transform("median") + frame["simulated_exchange_s"]
    return frame.assign(
        predicted_s=simulated,
        measured_share=frame["step_s"] / simulated,
        link_share=frame["link_bytes"] / frame["counted_bytes"],
        times_dense=frame["rate"].map(dense) / frame["step_s"],
    ).reset_index(drop=True)


def blocks(frame: pd.DataFrame, title: str) -> Iterator[str]:
    """Yield the page's paragraphs and tables, for each rate which simulations are off last."""
    yield f"{title}; {HOSTS}."
    yield NOTES
    for rate, rows in frame.groupby("rate", sort=False):
        share = rows["measured_share"]
        yield from (f"## {rate}", table(rows, COLUMNS))
        yield f"Measured over simulated: {share.min():.2f} to {share.max():.2f}, {off(rows, 'measured_share')}."
