"""Submit a study to SLURM, and find its runs in the queue."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.runs.files import write_atomic
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import State, state_of
from experiments.sweeps.job_script import Array, arrays_folder, arrays_of, ranges, script

_ANSWER_S = 60
_OF_USER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")  # variables that a user sets, not a job


def submit_array(name: str, jobs: list[list[str]], configs: list[TrainConfig], *, dry_run: bool) -> str:
    """Submit the runs of a study that are neither finished nor in the queue; return lines for the user.

    With ``dry_run`` these are the scripts and the runs, and nothing is written or submitted. Raises: UserError: sbatch
    is missing or refuses; the message names the arrays submitted before.
    """
    lines: list[str] = []
    for array in arrays_of(name, jobs, configs):
        try:
            lines.append(_submit(array, dry_run=dry_run))
        except UserError as error:
            raise UserError("; before it: ".join([str(error), *lines])) from None
    return "\n".join(lines)


def _submit(array: Array, *, dry_run: bool) -> str:
    output = Path(array.config.output)
    try:
        queued = in_queue(output)
    except UserError:  # a dry run shows the script without SLURM, too
        if not dry_run:
            raise
        queued = {}
    done = {run for run in array.runs if state_of(RunFolder(output / run)) == State.DONE}
    missing = [row for row, run in enumerate(array.runs, start=1) if run not in done and run not in queued]
    num_queued = len(array.runs) - len(done) - len(missing)
    state = f"{len(array.runs)} runs: {len(done)} done, {num_queued} queued or running"
    if not missing:
        return f"nothing to submit of {state}"
    script_path, rows_path, text = array.folder / "array.sh", array.folder / "runs.txt", script(array, missing)
    if dry_run:
        return f"# {array.device}\n# {script_path}\n{text}\n# {rows_path}\n{array.rows}"
    RunFolder(array.folder / "logs").make()
    write_atomic(rows_path, array.rows)
    write_atomic(script_path, text)
    job = _run("sbatch", "--parsable", str(script_path)).strip().partition(";")[0]
    return f"submitted {len(missing)} as array {job} (rows {ranges(missing)}) of {state}; {array.device}; {script_path}"


def in_queue(output: Path) -> dict[str, str]:
    """Return the runs of an output folder that are in SLURM's queue: folder's name, and task, state and reason.

    A task is ARRAY_TASK, as scancel takes it. Raises: UserError: no squeue.
    """
    found: dict[str, str] = {}
    for line in _run("squeue", "--noheader", "--array", "--format=%K %F %T %r %j").splitlines():
        number, array, state, words = line.strip().split(" ", 3)
        reason, _, job = words.rpartition(" ")  # a reason may have several words
        path = arrays_folder(output) / job / "runs.txt"
        if number.isdecimal() and path.exists():
            why = f" ({reason})" if reason != "None" else ""
            for row in path.read_text().splitlines()[int(number) - 1 : int(number)]:
                found[row.split(" ", 1)[0]] = f"SLURM {array}_{number}, {state.lower()}{why}"
    return found


def queued_folders(configs: Iterable[TrainConfig]) -> dict[RunFolder, str]:
    """Return the run folders of the output folders of these runs that are in SLURM's queue, none without squeue.

    Each has its task, state and reason; see ``in_queue``.
    """
    outputs = {Path(config.output) for config in configs} if shutil.which("squeue") else set()
    try:
        known = [(output, in_queue(output)) for output in outputs if arrays_folder(output).is_dir()]
        return {RunFolder(output / run): state for output, runs in known for run, state in runs.items()}
    except UserError as error:
        print(f"note: queued runs are unknown: {error}", file=sys.stderr)
        return {}


def _own_environment() -> dict[str, str]:
    """Return this process's environment, without the variables of a job that it runs in.

    A new job would inherit these; its srun would bind to the old job's cores, for instance. SBATCH_* are the user's
    defaults and stay.
    """
    is_in_job = "SLURM_JOB_ID" in os.environ
    drops = [name for name in os.environ if is_in_job and name.startswith("SLURM_") and name not in _OF_USER]
    return {name: value for name, value in os.environ.items() if name not in drops}


def _run(*command: str) -> str:
    """Run a command of SLURM and return its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, env=_own_environment())
    except FileNotFoundError:
        what = f"--backend slurm needs {command[0]}, which is not on this machine"
        raise UserError(f"{what}: call it where jobs are submitted, or add --dry-run") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} did not answer within {_ANSWER_S} s: is slurmctld up?") from None
    if done.returncode:
        lines = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise UserError(f"{command[0]} refused: {'; '.join(filter(None, lines))}")
    return done.stdout
