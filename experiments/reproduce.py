"""Run a paper's study and draw its figures: ``python -m experiments.reproduce PAPER --scale small|paper``.

A paper is a file of conf/paper: commands in their order, for a laptop (small) and as published (paper). Runs that are
finished are not run again, nor is a part whose command and inputs did not change. All that is found is collected in
one page, index.html, which opens without a network.

    python -m experiments.reproduce micro --scale small
    python -m experiments.reproduce oktopk --scale paper --root DATA cluster=local
"""

import argparse
import contextlib
import functools
import hashlib
import importlib
import io
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from experiments import sweep
from experiments.config.checks import SCALES
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.reports.html_page import write_page
from experiments.runs.atomic_files import load_json, write_json
from experiments.studies.paper_studies import Paper, Part, load_paper, papers
from experiments.training.preflight import prepare_runs
from experiments.training.runner import folder_of

STAMPS = "parts"  # a file per part: what it was made of, and what it left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake, 1 where a part failed, 130 after Ctrl-C."""
    options = parser().parse_intermixed_args(arguments)
    out = options.out or Path("results/papers") / f"{options.paper}-{options.scale}"
    try:
        paper = load_paper(options.paper, options.scale, out=out, root=options.root, overrides=options.overrides)
        check(paper)
        out.mkdir(parents=True, exist_ok=True)
        failed = reproduce(paper, out, again=options.again)
        page = write_page(paper, out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {error.filename or out}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    print(page)
    for part in failed:
        print(f"failed: {part.name}: {part.command}", file=sys.stderr)
    return int(bool(failed))


def check(paper: Paper) -> None:
    """Check every command, and every run of every study whose files are there, before the first one starts.

    Raises:
        UserError: a command that would not be understood, or a run that could not start.
    """
    for part in paper.parts:
        if not part.trains:
            _check_words(part)
        elif not _waits_for_files(part):
            configs_of(part)


def reproduce(paper: Paper, out: Path, *, again: bool = False) -> list[Part]:
    """Carry out all parts in turn and tell what each took and left; returns those that failed.

    Args:
        again: carry out parts that are as they were, too; finished runs stay.
    """
    failed = []
    for number, part in enumerate(paper.parts, 1):
        head = f"[{number}/{len(paper.parts)}] {part.name}"
        if _is_done(part, out) and (part.trains or not again):
            print(f"{head}: as it was, nothing to do", flush=True)
            continue
        print(f"{head}: {part.command}", flush=True)
        began = time.perf_counter()
        if _call(part):
            failed.append(part)
            print(f"{head}: failed after {time.perf_counter() - began:.0f} s", flush=True)
            continue
        seconds = time.perf_counter() - began
        files = _files(part)
        _note(part, out, seconds, files)
        left = f"{len(configs_of(part))} runs" if part.trains else f"{len(files)} files in {part.folder}"
        print(f"{head}: {seconds:.0f} s, {left}", flush=True)
    return failed


def configs_of(part: Part) -> list[TrainConfig]:
    """Return the checked runs of a part that trains. Raises: UserError as a sweep does."""
    return _composed(part.words[1:])


@functools.cache
def _composed(words: tuple[str, ...]) -> list[TrainConfig]:
    return prepare_runs(sweep.jobs(words[0], list(words[1:])))


def _check_words(part: Part) -> None:
    module = importlib.import_module(f"experiments.{part.words[0]}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = module.parser().parse_args(part.words[1:])
        if hasattr(module, "check_options"):
            module.check_options(options)
    except SystemExit:
        told = said.getvalue().splitlines() or ["its command asks for help alone"]
        raise UserError(f"part {part.name}: {told[-1]}") from None
    except UserError as error:
        raise UserError(f"part {part.name}: {error}") from None


def _waits_for_files(part: Part) -> bool:
    """Return whether a study names a file that an earlier part makes."""
    named = [word.partition("=")[2] for word in part.words if word.startswith("schedule.")]
    return any(not Path(name).exists() for name in named)


def _is_done(part: Part, out: Path) -> bool:
    if part.trains:
        return not _waits_for_files(part) and all(folder_of(config).is_done() for config in configs_of(part))
    stamp = load_json(_stamp(part, out))
    made_of = {key: stamp.get(key) for key in ("command", "inputs")}
    there = all((part.folder / name).exists() for name in stamp.get("files", ()))
    return there and made_of == {"command": part.command, "inputs": _inputs(part)}


def _call(part: Part) -> int:
    """Run a part's command in a process of its own, which a signal to this one stops as well; return its exit code."""
    process = subprocess.Popen([sys.executable, "-m", f"experiments.{part.words[0]}", *part.words[1:]])

    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        process.send_signal(number)  # it saves what it trains; waiting for that here would never end

    before = signal.signal(signal.SIGTERM, stop)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C reached it, too
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if asked:
        sys.exit(128 + asked[0])
    return code


def _inputs(part: Part) -> str:
    """Return a checksum of the files, and the ends of the runs, that a part's command names outside of its folder."""
    digest = hashlib.sha256()
    for word in part.words[1:]:
        path = Path(word)
        if not path.exists() or path == part.folder or part.folder in path.parents:
            continue
        for file in [path] if path.is_file() else sorted(path.glob("*/DONE")):
            digest.update(file.name.encode() + file.parent.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _files(part: Part) -> list[str]:
    return sorted(str(path.relative_to(part.folder)) for path in part.folder.rglob("*") if path.is_file())


def _note(part: Part, out: Path, seconds: float, files: list[str]) -> None:
    stamp = _stamp(part, out)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    made_of = {"command": part.command, "inputs": "" if part.trains else _inputs(part)}
    write_json(stamp, {**made_of, "seconds": round(seconds, 1), "files": files})


def _stamp(part: Part, out: Path) -> Path:
    return out / STAMPS / f"{part.name}.json"


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paper", help=f"one of {', '.join(papers())}")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings for every run of its studies")
    parser.add_argument("--scale", default="small", help=f"{' or '.join(SCALES)}: as published, or for a laptop")
    parser.add_argument("--root", default="data/cache", metavar="DIR", help="folder of the data sets (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results/papers/PAPER-SCALE by default")
    parser.add_argument("--again", action="store_true", help="redo tables and figures that are as they were, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
