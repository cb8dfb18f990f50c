"""Settings of a SLURM job: its queue, its limits, and the shell lines before Python starts."""

import re
from dataclasses import dataclass, field

from experiments.config.errors import UserError

LAUNCH = "MICRO_LAUNCH"  # "node" in a job script: each srun task starts the ranks of its node
IN_JOB = "slurm"  # a value of cluster.rdzv_endpoint: the nodes meet at the first node of the job
_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2})")
_LAST_SIGNAL_S = 65_535  # the largest value of sbatch


@dataclass(kw_only=True)
class SlurmConfig:
    """How a study is queued on a site that SLURM runs; it changes nothing of what a run computes.

    Attributes:
        partition, account, qos, constraint: as sbatch has them; null leaves the choice to the site.
        time_limit: of one run, hours:minutes:seconds, with days- before it where need be; null for the partition's own.
        gpus_per_node: GPUs to ask for, 0 for none.
        cpus_per_worker: cores to ask for, for each worker of a node.
        throttle: how many runs of the study may run at once, null for all.
        requeue: whether a run that the time limit stops is queued again and resumes.
        signal_s: how long before the time limit a run gets the signal to save and stop, in seconds; 0: never.
        setup: lines of shell before Python starts: modules to load, the environment to activate, ``head=ADDRESS``
            where the nodes meet elsewhere. With any, ``python`` is the one they make available; without, it is the
            one that submits.
        extra: more settings of sbatch, as it has them on its command line.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time_limit: str | None = None
    gpus_per_node: int = 0
    cpus_per_worker: int = 1
    throttle: int | None = None
    requeue: bool = True
    signal_s: int = 120
    setup: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)


def check_slurm(slurm: SlurmConfig) -> None:
    """Refuse settings that sbatch would refuse or misread.

    Raises:
        UserError: a value is out of range, or not written as sbatch reads it.
    """
    for key, lowest in {"gpus_per_node": 0, "cpus_per_worker": 1, "throttle": 1, "signal_s": 0}.items():
        value = getattr(slurm, key)
        if value is not None and value < lowest:
            raise UserError(f"cluster.slurm.{key} must be at least {lowest}, got {value}")
    if slurm.signal_s > _LAST_SIGNAL_S:
        raise UserError(f"cluster.slurm.signal_s must be at most {_LAST_SIGNAL_S}, got {slurm.signal_s}")
    for line in slurm.extra:
        if not re.fullmatch(r"-[^\n]*", line):
            raise UserError(f"cluster.slurm.extra must be settings of sbatch such as --exclusive, got {line!r}")
    for key in ("partition", "account", "qos", "constraint"):
        value = getattr(slurm, key)
        if value is not None and (not value.strip() or "\n" in value):
            raise UserError(
                f"cluster.slurm.{key} must be a name in one line, or null for the site's own, got {value!r}"
            )
    if slurm.time_limit is not None and _seconds(slurm.time_limit) <= slurm.signal_s:
        given = f"signal_s {slurm.signal_s} and time_limit {slurm.time_limit}"
        raise UserError(f"cluster.slurm.signal_s must be shorter than the time limit, got {given}")


def _seconds(time_limit: str) -> int:
    """Return a time limit in seconds.

    Only one of sbatch's formats is accepted. sbatch would read 10:00 as minutes; YAML reads 1:00:00 without quotes as
    the number 3600, which sbatch would read as minutes too.
    """
    found = _TIME.fullmatch(time_limit)
    if not found:
        allowed = "'hours:minutes:seconds' or 'days-hours:minutes:seconds', in quotes"
        raise UserError(f"cluster.slurm.time_limit must be {allowed}, got {time_limit}")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
