"""What this machine can do, and whether sparsifying can pay on it: ``python -m experiments.doctor``.

    python -m experiments.doctor --nproc 8                     # can eight workers train here, and on what
    python -m experiments.doctor --link-mbit 100,1000          # ... and what would pay on these links
    python -m experiments.doctor --json

Each check stands alone: what is not there (-) or fails (!) is one line, and the exit code stays 0.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from experiments.checkup import machine, surroundings
from experiments.checkup.findings import Finding, Section, section
from experiments.checkup.pair import Measured, measuring_pair
from experiments.checkup.rendering import show_plain, show_rich, to_json
from experiments.config.command_line import Parser, comma_list, run_command
from experiments.config.errors import UserError
from experiments.config.option_types import to_path, to_positive, whole_number
from experiments.config.ranges import MOST_ON_A_MACHINE

if TYPE_CHECKING:
    from micro.planning.collectives import Link


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out all checks and show what they find; returns 0, 2 for a mistake, or 130 after Ctrl-C."""
    return run_command(lambda: _run(_checked(_parser().parse_args(arguments))))


def _run(options: argparse.Namespace) -> int:
    on_terminal = sys.stdout.isatty() and find_spec("rich") is not None
    sections = _sections(options)
    if options.json:
        print(to_json(list(sections)))
        return 0
    for found in sections:
        (show_rich if on_terminal else show_plain)(found)
    return 0


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    if options.latency_us and not options.link_mbit:
        raise UserError("--latency-us is of the links that --link-mbit names: add that, or leave it out")
    return options


def _sections(options: argparse.Namespace) -> Iterator[Section]:
    nproc: int = options.nproc
    with ExitStack() as stack:
        measure = _once(_started(stack))
        yield section("versions", versions=machine.versions, packages=machine.packages)
        yield section(
            f"hardware, for {nproc} worker{'s' if nproc > 1 else ''}",
            cores=partial(machine.cores, nproc),
            load=machine.load,
            gpus=partial(machine.gpus, nproc),
            backends=machine.backends,
            compilers=machine.compilers,
            kernels=machine.kernels,
        )
        yield section(
            "surroundings",
            slurm=surroundings.slurm,
            wandb=surroundings.wandb,
            disks=surroundings.disks,
            datasets=surroundings.datasets,
        )
        yield section(
            "can sparsifying pay?", link=partial(_link, measure, options), advice=partial(_advice, measure, options)
        )


def _advice(measure: Callable[[], Measured], options: argparse.Namespace) -> Iterator[Finding]:
    """Which method is predicted to reach dense's accuracy first on each link, by published trainings."""
    if find_spec("pandas") is None:
        yield Finding(name="first there", value="unknown", note="it needs pandas: make setup", state="absent")
        return
    from experiments.checkup.advice import findings

    try:
        links = _links(measure(), options)
    except (OSError, RuntimeError):
        return  # the line of the link says why
    yield from findings(links, options.nproc, options.trace)


def _started(stack: ExitStack) -> Callable[[], Measured]:
    """Start the two ranks, which import while other checks go on; an error of the start is raised later."""
    try:
        return stack.enter_context(measuring_pair())
    except OSError as error:
        return partial(_fail, error)


def _once(measure: Callable[[], Measured]) -> Callable[[], Measured]:
    """Return what measures at the first call and returns, or raises, the same at every other."""
    found: list[Measured | OSError | RuntimeError] = []

    def measured() -> Measured:
        if not found:
            try:
                found.append(measure())
            except (OSError, RuntimeError) as error:
                found.append(error)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return measured


def _fail(error: OSError) -> Measured:
    raise error


def _link(measure: Callable[[], Measured], options: argparse.Namespace) -> Iterator[Finding]:
    """What two ranks measured, and what follows for their link and for those that were given."""
    from experiments.checkup.verdict import findings

    measured = measure()
    yield from findings(_links(measured, options), measured, options.nproc)


def _links(measured: Measured, options: argparse.Namespace) -> "dict[str, Link]":
    """Return the measured link and those that were given, by name."""
    from experiments.checkup.verdict import given_links, measured_link

    here = measured_link(measured)
    return {"this machine": here, **given_links(options.link_mbit, options.latency_us, here)}


def _parser() -> Parser:
    parser = Parser(
        prog="python -m experiments.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nproc",
        type=whole_number(1, MOST_ON_A_MACHINE),
        default=4,
        metavar="N",
        help="workers to ask about (%(default)s)",
    )
    parser.add_argument(
        "--link-mbit",
        type=comma_list(to_positive),
        default=[],
        metavar="RATE,RATE",
        help="other links to ask about, in Mbit/s",
    )
    parser.add_argument(
        "--latency-us", type=to_positive, metavar="US", help="latency of those links; by default what is measured here"
    )
    parser.add_argument(
        "--trace",
        type=to_path,
        metavar="FILE",
        help="of experiments.profile backward, to predict with; else a published one",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
