"""Measure the inputs of schedules and simulations: ``python -m experiments.profile backward|link|select``.

backward  when backward completes each gradient of a model: a trace
link      seconds of each collective by size: a table of the link
select    computation of each method by number of elements, without collectives: a table of selections

Each writes one file and prints its content. The command starts its ranks; under torchrun or srun, for instance on
several hosts, it joins their ranks, and rank 0 writes.

    python -m experiments.profile backward model=resnet18 dataset=cifar10 dataset.root=DIR --out trace.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.config.command_line import Parser, run_command, to_path
from experiments.config.errors import UserError
from experiments.config.ranges import MOST_ON_A_MACHINE
from experiments.launching.rank_environment import read_rank_environment
from experiments.runs.files import check_folder, load_json, writing
from experiments.tools.profile import backward, link, select
from experiments.tools.profile.on_ranks import DEVICES, check_device, join
from experiments.tools.ranks.group import measuring_ranks
from experiments.tools.shared.options import whole_number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 2 for a mistake, 1 for a failed rank, 130 after Ctrl-C."""
    return run_command(lambda: _run(parser().parse_args(arguments)), stopped="nothing was written")


def _run(options: argparse.Namespace) -> int:
    command, ranks = options.command, read_rank_environment()
    check_device(options.device, options.nproc)
    settings = command.prepare(options, ranks.world_size if ranks else options.nproc)
    check_file(options.out)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    if ranks:
        rows = join(command.work, settings, ranks, device=options.device)
    else:
        status = console.status(f"measuring on {options.nproc} ranks")
        with status, measuring_ranks(options.nproc, device=options.device) as started:
            rows = started.call(command.work, settings)[0]
    if rows is None:
        return 0
    with writing(options.out):
        written = command.write(rows, options, console)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    return 0


def check_file(path: Path) -> None:
    """Find out whether ``--out`` can be written; it may replace a document of this project alone.

    Raises:
        UserError: the folder takes no files, or another file, or a folder, has this name.
    """
    check_folder(path.parent)
    if path.is_dir():
        raise UserError(f"--out must be a file, got the folder {path}")
    is_ours = path.is_file() and (not path.stat().st_size or str(load_json(path).get("format")).startswith("micro-"))
    if path.exists() and not is_ours:
        raise UserError(f"{path} exists, and this command did not write it: remove it or choose another --out")


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("experiments.profile", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="backward|link|select")
    for module in (backward, link, select):
        command = commands.add_parser(module.NAME, help=(module.__doc__ or "").splitlines()[0])
        command.add_argument(
            "--nproc", type=whole_number(1, MOST_ON_A_MACHINE), default=2, help="ranks to start (%(default)s)"
        )
        command.add_argument(
            "--device", default="auto", metavar="|".join(DEVICES), help="auto: GPUs if there are enough"
        )
        command.add_argument(
            "--out", type=to_path, default=Path(f"results/profile/{module.NAME}.json"), help="file (%(default)s)"
        )
        module.add_arguments(command)
        command.set_defaults(command=module)
    return parser


if __name__ == "__main__":
    sys.exit(main())
