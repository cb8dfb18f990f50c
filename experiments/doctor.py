"""What this machine can do, and whether sparsifying can pay on it: ``python -m experiments.doctor``.

    python -m experiments.doctor --nproc 8                     # can eight workers train here, and on what
    python -m experiments.doctor --link-mbit 100,1000          # ... and what would pay on these links
    python -m experiments.doctor --json

Each check stands alone: what is not there (-) or fails (!) is one line, and the exit code stays 0.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from experiments.checkup import machine, surroundings
from experiments.checkup.findings import Finding, Section, section
from experiments.checkup.rendering import show, to_json
from experiments.config.command_line import Parser, run_command
from experiments.config.errors import UserError
from experiments.config.option_types import comma_list, to_path, to_positive, whole_number
from experiments.config.ranges import MOST_ON_A_MACHINE


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out all checks and show what they find; returns 0, 2 for a mistake, or 130 after Ctrl-C."""
    return run_command(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    if options.latency_us and not options.link_mbit:
        raise UserError("--latency-us is of the links that --link-mbit names: add that, or leave it out")
    if options.json:
        print(to_json(list(_sections(options))))
        return 0
    for found in _sections(options):
        show(found)
    return 0


def _sections(options: argparse.Namespace) -> Iterator[Section]:
    nproc: int = options.nproc
    yield section("versions", machine.versions, machine.packages)
    yield section(
        f"hardware, for {nproc} worker{'s' if nproc > 1 else ''}",
        partial(machine.cores, nproc),
        machine.load,
        partial(machine.gpus, nproc),
        machine.backends,
        machine.compilers,
        machine.kernels,
    )
    yield section("surroundings", surroundings.slurm, surroundings.wandb, surroundings.disks, surroundings.datasets)
    yield section("can sparsifying pay?", partial(_link, options))


def _link(options: argparse.Namespace) -> Iterator[Finding]:
    """What two ranks measured, what follows for their link and for those that were given, and what is first there."""
    from experiments.checkup import advice, break_even, pair

    measured = pair.measured_pair()
    here = break_even.measured_link(measured)
    links = {"this machine": here, **break_even.given_links(options.link_mbit, options.latency_us, here)}
    yield from break_even.findings(links, measured, options.nproc)
    yield from advice.findings(links, options.nproc, options.trace)


def _parser() -> Parser:
    parser = Parser("experiments.doctor", description=__doc__)
    add, workers, rates = parser.add_argument, whole_number(1, MOST_ON_A_MACHINE), comma_list(to_positive)
    add("--nproc", type=workers, default=4, metavar="N", help="workers to ask about (%(default)s)")
    add("--link-mbit", type=rates, default=[], metavar="RATE,RATE", help="other links to ask about, in Mbit/s")
    add("--latency-us", type=to_positive, metavar="US", help="latency of those links; by default what is measured here")
    help = "of experiments.profile backward, to predict with; else a published one"
    add("--trace", type=to_path, metavar="FILE", help=help)
    add("--json", action="store_true", help="one JSON document instead of text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
