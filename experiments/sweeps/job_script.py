"""Write a study as SLURM job arrays: a script and a list of runs for each cluster configuration.

Task N of an array runs line N of its list. The list never changes, because its folder is named by a hash of its
content. So a study that is submitted again, whole or in part, has the same run in the same line.
"""

import hashlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from experiments.config.checks import gpus_of_job
from experiments.config.errors import UserError
from experiments.config.schema import LAUNCH, TrainConfig
from experiments.config.stopping import EXIT_SAVED
from experiments.runs.run_folder import folder_of
from experiments.sweeps.num_jobs import num_processes

_READ_ROW = """\
row=$(sed -n "${{SLURM_ARRAY_TASK_ID:?submit this script with sbatch}}p" {rows})
[ -n "$row" ] || {{ echo "runs.txt has no line $SLURM_ARRAY_TASK_ID" >&2; exit 2; }}
run=${{row%% *}}
eval "words=(${{row#* }})"
"""

_MEETING = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')  # its name may not resolve
port=$((20000 + SLURM_JOB_ID % 10000))  # each task of the array has a job id of its own
"""

_RUN = """\
saved() {{ find {output}/"$run"/checkpoints -name 'step-*' 2>/dev/null | sort | tail -n 1; }}
before=$(saved)
echo "$run"
stopping= step=
trap 'stopping=yes; [ -z "$step" ] || kill -USR1 "$step"' USR1  # before the time limit; srun passes it on
# ALL: with sbatch's --export=NONE the tasks would not have what setup and this script set.
srun --export=ALL --ntasks-per-node=1 --cpus-per-task={cpus} --kill-on-bad-exit=1 \\
  {python} -m experiments.train "${{words[@]}}"{meeting} &
step=$!
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a signal ends a wait, not the run
"""

_REQUEUE = """\
if [ "$code" -eq {saved} ] || {{ [ "$stopping" ] && [ "$code" -ne 0 ]; }}; then
  if [ "$(saved)" != "$before" ]; then
    echo "$run was stopped before its end and is queued again"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "$run was stopped before it saved anything new, and is not queued again: raise cluster.slurm.time_limit" >&2
  fi
fi
"""


@dataclass(frozen=True, kw_only=True)
class Array:
    """Runs that request the same resources."""

    study: str  # its name: letters, digits, ``.``, ``_`` and ``-``
    config: TrainConfig  # the configuration of one run; all have the same cluster and output
    runs: tuple[str, ...]  # the folder name of each run
    words: tuple[tuple[str, ...], ...]  # the overrides of each run, none with a line break

    @property
    def rows(self) -> str:
        """The lines of the file of runs: for each run its folder's name and its overrides, quoted for bash."""
        pairs = zip(self.runs, self.words, strict=True)
        return "".join(f"{run} {shlex.join(words)}\n" for run, words in pairs)

    @property
    def device(self) -> str:
        """What the runs train on, in words."""
        gpus = gpus_of_job(self.config.cluster)
        asked = f"{gpus} GPUs a node" if gpus else "no GPUs: cluster.slurm.gpus_per_node=N does"
        return f"trains on {self.config.cluster.device}, requests {asked}"

    @property
    def folder(self) -> Path:
        """The folder of ``array.sh``, as it was last submitted, ``runs.txt`` and ``logs``."""
        place = arrays_folder(Path(self.config.output)).resolve()
        digest = hashlib.sha256(f"{place}\n{self.rows}".encode()).hexdigest()[:8]
        return place / f"{self.study}-{digest}"


def arrays_folder(output: Path) -> Path:
    """Return the folder of all arrays of an output folder."""
    return output / "slurm"


def arrays_of(name: str, jobs: list[list[str]], configs: list[TrainConfig]) -> list[Array]:
    """Return the arrays that a study needs: runs with different resources cannot share one.

    Raises: UserError: a run needs more GPUs than its job requests, or a path or a setting holds a line break.
    """
    study = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "study"  # names the job and the folder
    shapes: dict[str, list[tuple[TrainConfig, tuple[str, ...]]]] = {}
    for words, config in zip(jobs, configs, strict=True):
        cluster, needed = config.cluster, num_processes(config)
        if (gpus := gpus_of_job(cluster)) < needed and cluster.device == "cuda":
            requested = f"cluster.slurm.gpus_per_node (or what extra requests) is {gpus} for {needed} workers on a node"
            raise UserError(f"{requested}: set it to {needed}, or to 0 and cluster.device=cpu to train without")
        for text in (config.output, *words):
            _check_one_line(text)
        # By its digest a job refuses other data than that of the machine that submits it.
        digest = [f"dataset.digest={config.dataset.digest}"] if config.dataset.digest else []
        shape = str((config.output, cluster.nnodes, needed, cluster.simulated, cluster.device, cluster.slurm))
        shapes.setdefault(shape, []).append((config, (*words, *digest)))
    return [
        Array(
            study=study,
            config=members[0][0],
            runs=tuple(folder_of(config).path.name for config, _ in members),
            words=tuple(words for _, words in members),
        )
        for members in shapes.values()
    ]


def script(array: Array, rows: list[int], *, python: str | None = None, working: Path | None = None) -> str:
    """Return the job script that runs some lines of an array, whose numbers are from 1 and ascending.

    Args:
        python: the interpreter; by default this one, or ``python`` on the PATH if there are setup lines.
        working: the working directory, by default this process's.
    """
    cluster, slurm = array.config.cluster, array.config.cluster.slurm
    working = working or Path.cwd()
    _check_one_line(str(working))
    cpus = num_processes(array.config) * slurm.cpus_per_worker
    meeting = f" cluster.rdzv_endpoint={'$head:$port' if cluster.nnodes > 1 else 'localhost:0'}"
    run = _RUN.format(
        output=shlex.quote(str(Path(array.config.output).resolve())),
        cpus=cpus,
        python=python or ("python" if slurm.setup else shlex.quote(sys.executable)),
        meeting="" if cluster.simulated else meeting,
    )
    parts = [
        "#!/bin/bash",
        f"# Study {array.study}: task N runs line N of runs.txt, which holds the run's folder and then its settings.",
        *(f"#SBATCH {option}" for option in _options(array, rows, cpus, working)),
        "",
        _READ_ROW.format(rows=shlex.quote(str(array.folder / "runs.txt"))),
        *([_MEETING] if cluster.nnodes > 1 else []),
        *slurm.setup,
        f"export {LAUNCH}=node  # each task of srun starts the workers of its node",
        "",
        run,
        *([_REQUEUE.format(saved=EXIT_SAVED)] if slurm.requeue else []),
        'exit "$code"',
        "",
    ]
    return "\n".join(parts)


def ranges(rows: list[int]) -> str:
    """Return ascending numbers in SLURM's notation: 1,3-5."""
    parts = []
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        numbers = [row for _, row in group]
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(parts)


def _check_one_line(text: str) -> None:
    if "\n" in text:
        raise UserError(f"a job of SLURM takes paths and settings without line breaks, got {text!r}")


def _options(array: Array, rows: list[int], cpus: int, working: Path) -> Iterator[str]:
    """Yield the settings of sbatch."""
    cluster, slurm = array.config.cluster, array.config.cluster.slurm
    yield f"--job-name={shlex.quote(array.folder.name)}"
    yield f"--array={ranges(rows)}{f'%{slurm.throttle}' if slurm.throttle else ''}"
    yield f"--nodes={cluster.nnodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={cpus}"
    if slurm.gpus_per_node:
        yield f"--gpus-per-node={slurm.gpus_per_node}"
    chosen = {key: getattr(slurm, key) for key in ("partition", "account", "qos", "constraint")}
    for key, value in {**chosen, "time": slurm.time_limit}.items():
        if value is not None:
            yield f"--{key}={shlex.quote(value)}"
    if slurm.signal_s:
        yield f"--signal=B:USR1@{slurm.signal_s}"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    yield "--open-mode=append"
    yield f"--chdir={shlex.quote(str(working))}"
    logs = str(array.folder / "logs").replace("%", "%%")
    yield f"--output={shlex.quote(f'{logs}/%A_%a.log')}"
    yield from slurm.extra
