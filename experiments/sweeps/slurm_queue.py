"""Submit a study to SLURM, and find its runs in the queue."""

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.runs.atomic_files import cannot_write, write_atomic
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import State, state_of
from experiments.sweeps.job_script import Array, arrays_folder, arrays_of, ranges, script

_ANSWER_S = 60


def submit_array(name: str, jobs: list[list[str]], configs: list[TrainConfig], *, dry_run: bool) -> str:
    """Submit the runs of a study that are neither finished nor in the queue; return lines for the user.

    Args:
        name: of the study.
        jobs: the overrides of each run.
        configs: the checked configuration of each run.
        dry_run: only return the scripts and the runs; nothing is written or submitted.

    Raises:
        UserError: sbatch is missing or refuses; the message names the arrays submitted before.
    """
    lines: list[str] = []
    for array in arrays_of(name, jobs, configs):
        output = Path(array.config.output)
        queued = _in_queue_if_any(output) if dry_run else in_queue(output)
        done = {run for run in array.runs if state_of(RunFolder(output / run)) == State.DONE}
        missing = [row for row, run in enumerate(array.runs, start=1) if run not in done | queued]
        state = f"{len(done)} done, {len(queued.intersection(array.runs) - done)} queued or running"
        if not missing:
            lines.append(f"nothing to submit of {len(array.runs)} runs: {state}")
        elif dry_run:
            lines.append(f"# {array.script_path}\n{script(array, missing)}\n# {array.rows_path}\n{array.rows}")
        else:
            lines.append(f"{_submit(array, missing, lines)} of {len(array.runs)} runs: {state}; {array.script_path}")
    return "\n".join(lines)


def in_queue(output: Path) -> set[str]:
    """Return the folder names of the runs of an output folder that are in SLURM's queue, in any state.

    Raises:
        UserError: squeue is missing or does not answer.
    """
    folder = arrays_folder(output)
    found: set[str] = set()
    for line in _run("squeue", "--noheader", "--array", "--format=%K %j").splitlines():
        number, _, job = line.strip().partition(" ")
        path = folder / job / "runs.txt"
        if number.isdecimal() and path.exists():
            rows = path.read_text().splitlines()
            found.update(row.split(" ", 1)[0] for row in rows[int(number) - 1 : int(number)])
    return found


def queued_folders(configs: Iterable[TrainConfig]) -> set[RunFolder]:
    """Return the run folders of the output folders of these runs that are in SLURM's queue, none without squeue."""
    outputs = {Path(config.output) for config in configs} if shutil.which("squeue") else set()
    try:
        return {
            RunFolder(output / run) for output in outputs if arrays_folder(output).is_dir() for run in in_queue(output)
        }
    except UserError as error:
        print(f"note: which runs are queued is not known: {error}", file=sys.stderr)
        return set()


def _submit(array: Array, rows: list[int], lines: list[str]) -> str:
    try:
        (array.folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(array.folder, error) from None
    write_atomic(array.rows_path, array.rows)
    write_atomic(array.script_path, script(array, rows))
    try:
        job = _run("sbatch", "--parsable", str(array.script_path)).strip().partition(";")[0]
    except UserError as error:
        before = f"; before it: {'; '.join(lines)}" if lines else ""
        raise UserError(f"{error} ({array.script_path}){before}") from None
    return f"submitted {len(rows)} as array {job} (rows {ranges(rows)})"


def _in_queue_if_any(output: Path) -> set[str]:
    """Return the runs in the queue; none on a machine without SLURM, where a dry run still shows the script."""
    try:
        return in_queue(output)
    except UserError:
        return set()


def _run(*command: str) -> str:
    """Run a command of SLURM and return its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except FileNotFoundError:
        raise UserError(
            f"--backend slurm needs {command[0]}, which is not on this machine: call it where jobs are submitted, or "
            "add --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} did not answer within {_ANSWER_S} s: is slurmctld up?") from None
    if done.returncode:
        lines = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise UserError(f"{command[0]} refused: {'; '.join(filter(None, lines))}")
    return done.stdout
