"""Disturb trainings for a time that you set, and check that each ends with the weights of an undisturbed run.

    make soak TIME=2h SEED=7            every kind of run and of fault, for two hours
    make soak SEED=1234 CASES=1         the case of a seed once more
    python -m tests.soak --kinds simulated --faults signal,torn --methods micro,topk --time 10m

Signals strike a process of the run, a rank stands still, the disk fills, files are torn, the folder vanishes, the
command is given twice. Then the same command is given again until the run has ended. A case fails unless the run ends
with the same weights and records, every attempt ends in a few lines, and nothing is left behind: no process, draft or
lock. What a failed case left is kept. Full disks need root. The exit code is 1 if a case failed, 130 after Ctrl-C.
"""

import argparse
import itertools
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.config.command_line import Parser, run_command
from experiments.config.errors import UserError, check_choice
from experiments.config.option_types import comma_list

_UNITS = {"s": 1, "m": 60, "h": 3600}
_PER_SETUP = 4  # consecutive seeds that share a run, and so one undisturbed training


def main() -> None:
    """Run the command line."""
    sys.exit(run_command(lambda: _run(sys.argv[1:])))


def _run(words: Sequence[str]) -> int:
    from tests.soak import orphans
    from tests.soak.case import FAULTS, KINDS, methods

    options = _parser().parse_args(words)
    for name, known in (("kinds", list(KINDS)), ("faults", list(FAULTS)), ("methods", methods())):
        given = getattr(options, name) or known
        for word in given:
            check_choice(f"--{name}", known, word)
        setattr(options, name, given)
    if sys.platform != "linux":
        raise UserError("the soak needs Linux, whose processes it watches")
    orphans.adopt()
    with tempfile.TemporaryDirectory(prefix="micro-soak-") as work:
        return _soak(options, Path(work))


def _soak(options: argparse.Namespace, work: Path) -> int:
    """Carry out cases until the time is over or there were enough; return the exit code."""
    from tests.soak.case import draw_setup
    from tests.soak.trial import Trial

    fired, failed = Counter[str](), 0
    end, trial, place = time.monotonic() + options.time, None, None
    for number, seed in enumerate(itertools.count(options.seed)):
        if time.monotonic() >= end or number == options.cases:
            break
        if trial is None or seed // _PER_SETUP != place:
            place = seed // _PER_SETUP
            trial = Trial(draw_setup(place, options.kinds, options.methods), work / str(place))
        started = time.monotonic()
        result = trial.disturb(seed, options.faults)
        fired.update(result.fired)
        ended = f"FAILED: {'; '.join(result.problems)}" if result.problems else "equal"
        print(f"seed {seed}: {trial.setup}, {time.monotonic() - started:.0f} s: {' | '.join([*result.story, ended])}")
        if result.problems:
            failed += 1
            kept = shutil.copytree(work / str(place), options.folder / str(seed), dirs_exist_ok=True)
            chosen = " ".join(f"--{key} {','.join(getattr(options, key))}" for key in ("kinds", "faults", "methods"))
            print(f"  kept: {kept}; again: make soak SEED={seed} CASES=1 ARGS='{chosen}'")
        sys.stdout.flush()
    print(f"{number} cases, {failed} failed; {', '.join(f'{count} {kind}' for kind, count in fired.most_common())}")
    return int(failed > 0)


def _parser() -> Parser:
    description, _, text = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m tests.soak", description=description, epilog=text, formatter_class=raw)
    add = parser.add_argument
    add("--time", type=_seconds, default=600, help="how long, as 90s, 30m or 2h (default: 10m)")
    add("--seed", type=int, default=int(time.time()), help="of the first case (default: the time)")
    add("--cases", type=int, help="stop after so many (default: when the time is over)")
    add("--kinds", type=comma_list(str), help="of runs: simulated,local,torchrun (default: all)")
    add("--faults", type=comma_list(str), help="kinds of faults (default: all)")
    add("--methods", type=comma_list(str), help="names of conf/sparsifier (default: all)")
    add("--folder", type=Path, default=Path("results/soak"), help="for what failed cases left")
    return parser


def _seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)([smh])", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"must be a time as 90s, 30m or 2h, got '{text}'")
    return int(found[1]) * _UNITS[found[2]]


if __name__ == "__main__":
    main()
