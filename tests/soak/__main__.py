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
from pathlib import Path

from experiments.config.command_line import Parser, run_command
from experiments.config.errors import check_choice
from experiments.config.option_types import comma_list

_UNITS = {"s": 1, "m": 60, "h": 3600}
_PER_SETUP = 4  # consecutive seeds that share a run, and so one undisturbed training


def main() -> None:
    """Run the command line."""
    sys.exit(run_command(lambda: _run(_parser().parse_args())))


def _run(options: argparse.Namespace) -> int:
    """Carry out cases until the time is over or there were enough; return the exit code."""
    from tests.soak.attempt import adopt_orphans
    from tests.soak.case import FAULTS, KINDS, draw_setup, methods
    from tests.soak.trial import Trial

    for name, known in (("kinds", list(KINDS)), ("faults", list(FAULTS)), ("methods", methods())):
        setattr(options, name, getattr(options, name) or known)
        for word in getattr(options, name):
            check_choice(f"--{name}", known, word)
    adopt_orphans()
    fired, num_failed, number = Counter[str](), 0, 0
    end, trials = time.monotonic() + options.time, dict[int, Trial]()
    with tempfile.TemporaryDirectory(prefix="micro-soak-") as work:
        for seed in itertools.count(options.seed):
            if time.monotonic() >= end or number == options.cases:
                break
            place, number, started = seed // _PER_SETUP, number + 1, time.monotonic()
            if place not in trials:
                setup = draw_setup(place, options.kinds, options.methods)
                trials = {place: Trial(setup, Path(work, str(place)))}
            result = trials[place].disturb(seed, options.faults)
            fired.update(result.fired)
            ended = f"FAILED: {'; '.join(result.problems)}" if result.problems else "equal"
            story = " | ".join([*result.story, ended])
            print(f"seed {seed}: {trials[place].setup}, {time.monotonic() - started:.0f} s: {story}", flush=True)
            if result.problems:
                num_failed += 1
                kept = shutil.copytree(Path(work, str(place)), options.folder / str(seed), dirs_exist_ok=True)
                same = " ".join(f"--{key} {','.join(getattr(options, key))}" for key in ("kinds", "faults", "methods"))
                print(f"  kept: {kept}; again: make soak SEED={seed} CASES=1 ARGS='{same}'", flush=True)
    print(f"{number} cases, {num_failed} failed; {', '.join(f'{count} {kind}' for kind, count in fired.most_common())}")
    return int(num_failed > 0)


def _parser() -> Parser:
    description, _, text = (__doc__ or "").partition("\n\n")
    parser = Parser("python -m tests.soak", description=description, epilog=text)
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
    found = re.fullmatch(r"([1-9]\d*)([smh])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be a time as 90s, 30m or 2h, got '{text}'")
    return int(found[1]) * _UNITS[found[2]]


if __name__ == "__main__":
    main()
