"""Check what this machine has, and predict whether sparsifying pays on it: ``python -m experiments.doctor``.

    python -m experiments.doctor --nproc 8                     # can eight workers train here, on which devices
    python -m experiments.doctor --link-mbit 100,1000          # ... and which methods pay on these links
    python -m experiments.doctor --json

Checks are independent: a missing part (-) or a failed check (!) is one line, and the exit code stays 0.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from experiments.config.command_line import Parser, comma_list, run_command
from experiments.config.errors import UserError
from experiments.config.ranges import MOST_ON_A_MACHINE
from experiments.tools.doctor import machine
from experiments.tools.doctor.findings import Finding, carry_out, show, to_json
from experiments.tools.shared.options import to_known_path, to_positive, whole_number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks and show their findings; return 0, 2 for a mistake, or 130 after Ctrl-C."""
    return run_command(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    if options.latency_us and not options.link_mbit:
        raise UserError("--latency-us is of the links that --link-mbit names: add that, or leave it out")
    sections = {}
    for title, checks in _checks(options).items():
        sections[title] = list(carry_out(checks))
        if not options.json:
            show(title, sections[title])
    if options.json:
        print(to_json(sections))
    return 0


def _checks(options: argparse.Namespace) -> dict[str, dict[str, Callable[[], Iterable[Finding]]]]:
    """Return the checks of each section, by name."""
    nproc: int = options.nproc
    hardware = {"cores": partial(machine.cores, nproc), "gpus": partial(machine.gpus, nproc)}
    surroundings = (machine.slurm, machine.wandb, machine.disks, machine.datasets)
    return {
        "versions": {"versions": machine.versions},
        f"hardware, for {nproc} worker{'s' if nproc > 1 else ''}": {**hardware, "compilers": machine.compilers},
        "surroundings": {check.__name__: check for check in surroundings},
        "can sparsifying pay?": {"link": partial(_link, options)},
    }


def _link(options: argparse.Namespace) -> Iterator[Finding]:
    from experiments.tools.doctor.link import link  # imports torch, which --help should not wait for

    yield from link(options.link_mbit, options.latency_us, options.nproc, options.trace)


def _parser() -> Parser:
    parser = Parser("experiments.doctor", description=__doc__)
    add, workers, rates = parser.add_argument, whole_number(1, MOST_ON_A_MACHINE), comma_list(to_positive)
    add("--nproc", type=workers, default=4, metavar="N", help="number of workers to check for (%(default)s)")
    add(
        "--link-mbit",
        type=rates,
        default=[],
        metavar="RATE,RATE",
        help="rates of other links to predict for, in Mbit/s",
    )
    add("--latency-us", type=to_positive, metavar="US", help="latency of those links; by default as measured here")
    help = "trace of experiments.profile backward for predictions; by default a published one"
    add("--trace", type=to_known_path, metavar="FILE", help=help)
    add("--json", action="store_true", help="one JSON document instead of text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
