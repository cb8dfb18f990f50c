"""Disturb trainings for a time that you set, and check that each ends with the weights of an undisturbed run.

    make soak TIME=2h SEED=7            every kind of run and of fault, for two hours
    make soak SEED=1234 CASES=1         the case of a seed once more
    python -m tests.soak --kinds simulated --faults signal,torn --methods micro,topk --time 10m

Each case follows from its seed; the seeds of a soak follow each other. Signals strike a process of the run, are ignored
or not, the disk fills, files are torn, links are cut, clocks jump, the folder vanishes, at the n-th time that a process
saves, sends, writes a row or changes the disk. Then the same command is given again until the run has ended. A case
fails unless the run ends with the same weights and records, every attempt ends in a few lines that name the true
cause, and nothing is left behind: no process, draft, temporary file or lock. What a failed case left is kept.

Full disks need root, hosts with links root and iproute2; both are left out elsewhere, and the first line says so.
The exit code is 1 if a case failed, 130 after Ctrl-C.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.config.command_line import Parser, comma_list, run_command
from experiments.config.errors import UserError, check_choice

_UNITS = {"s": 1, "m": 60, "h": 3600}


def main() -> None:
    """Run the command line."""
    sys.exit(run_command(lambda: _run(sys.argv[1:])))


def _run(words: Sequence[str]) -> int:
    from tests.soak.case import FAULTS, KINDS, methods

    options = _parser().parse_args(words)
    for name, known in (("kinds", KINDS), ("faults", FAULTS), ("methods", methods())):
        for word in getattr(options, name) or ():
            check_choice(f"--{name}", known, word)
    if sys.platform != "linux":
        raise UserError("the soak needs Linux, whose processes it watches")
    from tests.soak.run import soak  # imports torch: mistakes are reported before that

    return soak(options)


def _parser() -> Parser:
    description, _, text = (__doc__ or "").partition("\n\n")
    parser = Parser(
        "python -m tests.soak",
        description=description,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--time", type=_seconds, default=600, help="how long, as 90s, 30m or 2h (default: 10m)")
    parser.add_argument("--seed", type=_natural, help="of the first case (default: of the time)")
    parser.add_argument("--cases", type=_natural, help="stop after so many (default: when the time is over)")
    parser.add_argument("--kinds", type=comma_list(str), help="of runs: simulated,local,torchrun,hosts (default: all)")
    parser.add_argument("--faults", type=comma_list(str), help="kinds of faults (default: all)")
    parser.add_argument("--methods", type=comma_list(str), help="names of conf/sparsifier (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("results/soak"), help="for what failed cases left")
    return parser


def _seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)([smh])", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"must be a time as 90s, 30m or 2h, got '{text}'")
    return int(found[1]) * _UNITS[found[2]]


def _natural(text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number, got '{text}'")
    return int(text)


if __name__ == "__main__":
    main()
