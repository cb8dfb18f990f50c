"""Measure what a step costs: ``python -m experiments.bench NAME``.

step   each method's reduction, relative to its floor (the memory traffic of any sparse step), or, with --against
       REVISION, to another revision of this code
network  training over links of a known rate, between network namespaces: methods, schedules and local steps, measured
       and predicted, with the kernel's count of bytes (needs root)
gpu    a test and benchmark of a machine with GPUs, in half an hour: kernels, gloo and NCCL, every method, DDP, FSDP2,
       mixed precision

Each prints its tables as Markdown and writes them with their numbers into the folder --out, some with a figure. Times
come from one run on one machine: compare them within a table, not across machines.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.config.command_line import Parser, run_command, to_path
from experiments.runs.files import check_folder
from experiments.tools.bench.gpu import command as gpu
from experiments.tools.bench.network import command as network
from experiments.tools.bench.step import command as step


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line and run one benchmark; exit 2 for a mistake, 1 for a failed rank, 130 after Ctrl-C."""
    given = sys.argv[1:] if words is None else list(words)
    code = run_command(lambda: _run(parser().parse_args(given), given))
    if code:
        sys.exit(code)


def _run(options: argparse.Namespace, words: list[str]) -> int:
    check_folder(options.out)
    options.words = words
    options.run(options, Console() if sys.stdout.isatty() else Console(width=140))
    return 0


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("experiments.bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for benchmark in (step, network, gpu):
        command = commands.add_parser(
            benchmark.NAME, help=(benchmark.__doc__ or "").splitlines()[0], description=benchmark.__doc__
        )
        command.add_argument("--out", type=to_path, default=Path("results/bench"), help="folder for the tables")
        benchmark.add_arguments(command)
        command.set_defaults(run=benchmark.run)
    return parser


if __name__ == "__main__":
    main()
