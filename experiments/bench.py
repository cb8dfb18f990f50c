"""Measure what a step costs: ``python -m experiments.bench NAME``.

step   every method's reduction against its floor, the memory traffic that no sparse step can avoid
select the scan for what is at or above a threshold against torch's ways to do it, and against one read of the vector
threads  the compiled loops on all threads of a rank against one thread
ranks  what a rank computes for one bucket as ranks grow in number, without a network
bare   packing, FFT sparsification and PowerSGD against a copy, the transforms and the products of matrices in them
transform  the FFT at good and bad lengths against a power of two
loop   a training step of the harness against a bare PyTorch loop with DDP, dense against dense
start  a short run from its command to its end, against a bare torchrun of the same model and length
loading  what drawing a batch costs beside the step that it is for
rules  the density that MiCRO's three rules give, on synthetic gradients with a tenfold jump of scale
network  training over links of a known rate, on hosts that are network namespaces: methods and schedules, measured and
       predicted, with the kernel's count of bytes (needs root)
network_rounds  forms of local steps on such hosts: seconds of a batch beside those that the page on equal tokens
       simulates, with the kernel's count of bytes (needs root)
gpu    Triton's kernels on a GPU: equal to the reference, bandwidth, reads by the host, CUDA graphs, and steps of all
       methods, of one rank and over NCCL on several GPUs; without a GPU in Triton's interpreter, and compiled for GPUs
       that are not there

Each prints a table and writes it as csv under --out; rules, network and network_rounds draw a figure, too. Times come
from one run on one machine: compare them within a table, not across machines. step, ranks and loop take
--against REVISION: an older revision of this code and this one measure in turn, and the table has the ratios of what
they found.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.benchmarks import (
    against,
    bare,
    gpu,
    loading,
    loop,
    network,
    network_rounds,
    ranks,
    rules,
    select,
    start,
    step,
    step_against,
    threads,
    transform,
)
from experiments.config.command_line import Parser, run_command
from experiments.config.option_types import to_path
from experiments.launching.failures import RankFailure
from experiments.reports.output import check_folder

COMPARED = {  # what --against compares by whole runs of both revisions
    ranks.NAME: against.Compared(("method", "numel", "ranks"), ("ms",)),
    loop.NAME: against.Compared(("run",), ("ratio", "harness_s")),
}


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line and run one benchmark; exit 2 for a mistake, 1 for a failed rank, 130 after Ctrl-C."""
    given = sys.argv[1:] if words is None else list(words)
    code = run_command(lambda: _run(parser().parse_args(given), given))
    if code:
        sys.exit(code)


def _run(options: argparse.Namespace, words: list[str]) -> int:
    check_folder(options.out)
    options.words = words
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        if getattr(options, "against", None) is None:
            options.run(options, console)
        elif options.benchmark == step.NAME:
            step_against.run(options, console)
        else:
            against.run(options.benchmark, options.compared, words, options, console)
    except RankFailure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> Parser:
    """Return what reads the command line."""
    parser = Parser(
        prog="python -m experiments.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for benchmark in (
        step,
        select,
        threads,
        ranks,
        transform,
        bare,
        loop,
        start,
        loading,
        rules,
        network,
        network_rounds,
        gpu,
    ):
        command = commands.add_parser(
            benchmark.NAME,
            help=(benchmark.__doc__ or "").splitlines()[0],
            description=benchmark.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--out", type=to_path, default=Path("results/bench"), help="folder of the tables")
        benchmark.add_arguments(command)
        command.set_defaults(run=benchmark.run)
        if benchmark is step:
            against.add_arguments(command, pairs=step_against.PAIRS, turns="turns of each, of --steps in all")
        elif compared := COMPARED.get(benchmark.NAME):
            against.add_arguments(command)
            command.set_defaults(compared=compared)
    return parser


if __name__ == "__main__":
    main()
