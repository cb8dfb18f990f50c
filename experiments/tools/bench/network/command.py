"""Train over links of a known rate between hosts on this machine, and compare measured and predicted times.

Ways to train: a method of conf/sparsifier, exchanging gradients after each batch; METHOD:SCHEDULE, with the buckets of
a schedule; METHOD:H, local steps that exchange weight differences after H steps, METHOD:H:nesterov with that outer
optimizer; METHOD+N, gradients accumulated over N batches; or torch's ddp and torch_fp16.

Reports the time of a batch and its lower bound (the larger of its computation, measured on the same hosts, and of its
bytes at the link's rate), bytes counted by the kernel and by each method, and the time predicted from profiles of the
same hosts and run. Needs root on Linux.

Each rate takes --link-seconds, and each way to train about --seconds, with at least three exchanges; profiles of model
and methods take about a minute first. With the defaults a run takes at most twelve minutes on two idle cores, one per
host. A stopped run writes its finished part.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import pandas as pd
from rich.console import Console

from experiments.config.command_line import add_settings, comma_list
from experiments.config.errors import UserError
from experiments.reports.names import human
from experiments.reports.times import FRAME, LATENCY_S
from experiments.tools.bench import tables
from experiments.tools.bench.network import training
from experiments.tools.bench.network.prediction import Prediction, measure_link, profile_methods, profile_model
from experiments.tools.bench.network.report import blocks, compared, draw
from experiments.tools.bench.network.ways import FP16, OF_TORCH, Way, ways_of
from experiments.tools.bench.tables import slowest_of
from experiments.tools.ranks.group import RankGroup
from experiments.tools.ranks.hosts import Hosts, bits_per_s, burst_s
from experiments.tools.ranks.measures import Row
from experiments.tools.shared.options import to_density, to_positive, whole_number

NAME = "network"
WARM_UP_BATCHES = 4  # DDP settles its buckets after the first step
FEWEST = 3  # measured exchanges
CHOICES = "ddp,dense:mgwfbp,micro,micro:sparse_exact,cltk,topk,oktopk,gaussiank,powersgd,torch_fp16"
DEFAULTS = [
    "model=resnet18",
    "dataset=synthetic",
    "dataset.settings={num_samples: 512, image_size: 32, channels: 3, num_classes: 10}",
    "batch_size=16",
    "optimizer.momentum=0",
]
SETTLED = ("sparsifier", "schedule", "cluster", "output", "density", "rounds", "accumulate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add, names = parser.add_argument, comma_list(str)
    add("--rates", type=names, default="100mbit,1gbit", metavar="A,B", help="of the links (%(default)s)")
    add("--hosts", type=whole_number(2), default=2, help="with one rank each (%(default)s)")
    add("--steps", type=whole_number(), default=12, help="measured batches, after a warm-up (%(default)s)")
    help = f"time of each way at each rate, kept to by fewer exchanges, at least {FEWEST} (%(default)s)"
    add("--seconds", type=to_positive, default=20.0, help=help)
    add("--density", type=to_density, default=0.01, help="target of the sparse methods (%(default)s)")
    add("--methods", type=names, default=CHOICES, metavar="A,B", help="ways to train, see above (%(default)s)")
    add("--link-seconds", type=to_positive, default=8.0, help="to measure each rate for (%(default)s)")
    add_settings(parser, help="model, dataset and so on, as for train; ResNet-18 on drawn 32 x 32 images by default")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the tables and the figure; a stopped run writes its finished part.

    Raises:
        UserError: a mistake, or the machine cannot create hosts; nothing is started.
        GroupError: a rank failed.
    """
    for rate in arguments.rates:
        bits_per_s(rate)
    for word in arguments.overrides:
        if word.split("=")[0].split(".")[0] in SETTLED:
            raise UserError(f"'{word}': this benchmark sets it itself; see --methods, --density and --hosts")
    overrides = [*(arguments.overrides or DEFAULTS), f"density={arguments.density!r}"]
    ways = ways_of(arguments.methods, overrides, arguments.hosts)
    config = ways[0].config
    where = f"batch {config.batch_size} on each of {arguments.hosts} hosts, density {arguments.density:g}"
    title = f"{human(config.model.name)} on {human(config.dataset.name)}, {where}"

    def report(rows: pd.DataFrame) -> None:
        frame = compared(rows)
        heading = "Training over links of a known rate"
        tables.write(frame, heading, blocks(frame, title), arguments, console, draw(frame, title))

    tables.report_rows(_measured(arguments, ways, console), report)


def _measured(arguments: argparse.Namespace, ways: Sequence[Way], console: Console) -> Iterator[Row]:
    """Yield a row per way and rate, and print a line for it."""
    plain = [way for way in ways if way.is_plain and way.method not in OF_TORCH]
    sparse = dict.fromkeys(way.method for way in plain if not way.config.sparsifier.is_dense)
    with Hosts(arguments.hosts) as hosts, RankGroup(arguments.hosts, prefixes=hosts.prefixes()) as ranks:
        console.print("profiling the model and the methods")
        trace = profile_model(ranks, arguments.overrides or DEFAULTS)
        select = profile_methods(ranks, list(sparse), trace.numel, arguments.density)
        for rate in arguments.rates:
            hosts.shape(rate)
            link = measure_link(ranks, rate, arguments.link_seconds)
            prediction = Prediction(trace, select, link, ahead_s=burst_s(rate))
            for way in ways:
                row = _measure(way, prediction, hosts, ranks, rate, arguments)
                yield row
                console.print(f"{rate}: {way.title}: {row['step_s']:.4g} s, {row['predicted_s']:.4g} s predicted")


def _measure(
    way: Way, prediction: Prediction, hosts: Hosts, ranks: RankGroup, rate: str, arguments: argparse.Namespace
) -> Row:
    """Train one way over the current links; return measurements per batch of a worker."""
    plan = None
    if way.schedule and way.schedule.is_planned:
        plan = way.schedule.plan(prediction.problem(way.method, way.reducer))
    started, interval = time.monotonic(), way.interval
    ranks.call(training.begin, way.method, way.words, plan, way.is_plain)
    warm = slowest_of(ranks.call(training.take, -(-WARM_UP_BATCHES // interval)))
    left_s = arguments.seconds - (time.monotonic() - started)
    affordable = int(left_s / (warm[-1]["seconds"] + way.is_plain * warm[-1]["compute_s"]))
    number = max(FEWEST, min(-(-arguments.steps // interval), affordable))
    before = hosts.counters()
    answers = ranks.call(training.take, number)
    on_link = [now - then for now, then in zip(hosts.counters(), before, strict=True)]
    link_bytes = statistics.fmean(one.payload_bytes for one in on_link) / (number * interval)
    exchanges = pd.DataFrame(slowest_of(answers))
    seconds, compute_s = exchanges["seconds"] / interval, exchanges["compute_s"].median()
    sent, calls = (pd.concat(map(pd.DataFrame, answers))[["sent", "calls"]].mean() / interval).tolist()
    if way.is_plain and way.method != FP16:
        predicted_s = prediction.step_s(way.method, way.reducer, way.schedule, compute_s)
    else:  # nothing overlaps, and each collective is a ring
        messages_s = LATENCY_S * 2 * (arguments.hosts - 1) * calls
        predicted_s = float("nan") if way.is_plain else compute_s + messages_s + FRAME * 8 * sent / bits_per_s(rate)
    return {
        "rate": rate,
        "method": way.name,
        "title": way.title,
        "num_steps": number * interval,
        "step_s": seconds.median(),
        "least_s": seconds.min(),
        "most_s": seconds.max(),
        "samples_per_s": arguments.hosts * way.config.batch_size / seconds.median(),
        "link_bytes": link_bytes,
        "counted_bytes": sent,
        "predicted_s": predicted_s,
        "compute_s": compute_s,
        "wire_s": FRAME * 8 * link_bytes / bits_per_s(rate),
    }
