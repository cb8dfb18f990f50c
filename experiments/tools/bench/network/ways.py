"""The ways to train that ``bench network`` compares: torch's DDP, methods with buckets, local steps."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import micro
from experiments.config.builders import build_reducer
from experiments.config.errors import UserError, as_user_error
from experiments.config.keys import flat
from experiments.config.schema import TrainConfig
from experiments.planning.schedules.base import Schedule
from experiments.reports.names import label
from experiments.reports.rounds_in_words import exchanged, interval, short
from experiments.training.preflight import prepare_runs

DDP, FP16 = "ddp", "torch_fp16"
OF_TORCH = {DDP: "DDP", FP16: "DDP's fp16 hook"}
WAY = re.compile(r"(?P<method>\w+)(?:\+(?P<added>\d+)|:(?P<every>\d+)(?P<nesterov>:nesterov)?|:(?P<schedule>\w+))?")
FORMS = "METHOD, METHOD:SCHEDULE, METHOD:H, METHOD:H:nesterov or METHOD+N"
NESTEROV = ["rounds.lr=0.7", "rounds.momentum=0.9", "rounds.nesterov=true"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        method: ddp or torch_fp16, or a name of conf/sparsifier.
        schedule: for its buckets; None: the method's default.
        config, words: configuration and command line of the training.
    """

    name: str
    method: str
    schedule: Schedule | None
    config: TrainConfig
    words: list[str]

    @property
    def is_plain(self) -> bool:
        """Whether gradients are exchanged after each batch."""
        return self.interval == 1 and not self.config.rounds.every

    @property
    def interval(self) -> int:
        """Batches per worker between two exchanges."""
        return interval(flat(asdict(self.config)))

    @property
    def title(self) -> str:
        """Its name in tables and figures."""
        base, settings = OF_TORCH.get(self.method) or label(self.method), flat(asdict(self.config))
        own = self.schedule.name if self.schedule else "" if self.is_plain else short(settings) or exchanged(settings)
        return f"{base}, {own}" if own else base

    @property
    def reducer(self) -> micro.Reducer:
        """The reducer of the gradients; dense for torch's own."""
        return build_reducer(self.config)


def ways_of(names: Sequence[str], overrides: Sequence[str], num_hosts: int) -> list[Way]:
    """Return the ways of these names. Raises: UserError: a mistake."""
    return [_way(name, overrides, num_hosts) for name in dict.fromkeys(names)]


def _way(name: str, overrides: Sequence[str], num_hosts: int) -> Way:
    form = WAY.fullmatch(name)
    if form is None or (form["method"] in OF_TORCH and form["method"] != name):
        raise UserError(f"--methods must be {', '.join(OF_TORCH)}, {FORMS}, got '{name}'")
    method, schedule = form["method"], _schedule(form["schedule"]) if form["schedule"] else None
    words = [f"sparsifier={'dense' if method in OF_TORCH else method}", *overrides, "cluster=local", "output=unused"]
    words += [f"cluster.nproc_per_node={num_hosts}"]
    words += [f"accumulate={form['added']}"] if form["added"] else []
    words += [f"rounds.every={form['every']}"] if form["every"] else []
    words += NESTEROV if form["nesterov"] else []
    words += [f"schedule={schedule.name}"] if schedule and not schedule.is_planned else []
    return Way(name, method, schedule, config_of(words, num_hosts), words)


def config_of(words: list[str], world_size: int) -> TrainConfig:
    """Return the configuration of a training. Raises: UserError: invalid words."""
    (config,) = prepare_runs([words], joined_world_size=world_size)
    return config


def _schedule(name: str) -> Schedule:
    with as_user_error():
        return micro.build(Schedule, name)
