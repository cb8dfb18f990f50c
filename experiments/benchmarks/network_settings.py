"""What ``experiments.bench network`` measures: the options, checked, and the ways to train."""

import argparse
from dataclasses import dataclass

import micro
from experiments.benchmarks.network_training import DDP, FP16, POWERSGD, config_of
from experiments.config.builders import build_reducer
from experiments.config.errors import UserError, suggestion
from experiments.config.schema import TrainConfig
from experiments.ranks.hosts import bits_per_s
from experiments.reports.names import label
from micro.planning.schedules.base import Schedule

DEFAULTS = [
    "model=resnet18",
    "dataset=synthetic",
    "dataset.settings={num_samples: 512, image_size: 32, channels: 3, num_classes: 10}",
    "batch_size=16",
]
OF_TORCH = {DDP: "DDP", FP16: "DDP's fp16 hook", POWERSGD: "DDP's PowerSGD hook"}
SETTLED = ("sparsifier", "schedule", "cluster", "output", "density")


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to train: a method, and the schedule that makes its buckets.

    Attributes:
        method: one of torch's own, or a name of conf/sparsifier.
        schedule: None where the method brings its own: DDP's buckets for dense, one for everything else.
        config: of the training, as the ranks have it.
    """

    method: str
    schedule: Schedule | None
    config: TrainConfig
    overrides: list[str]

    @property
    def name(self) -> str:
        """How it is chosen on the command line."""
        return f"{self.method}:{self.schedule.name}" if self.schedule else self.method

    @property
    def title(self) -> str:
        """How it is called in tables and figures."""
        base = OF_TORCH.get(self.method) or label(self.method)
        return f"{base}, {self.schedule.name}" if self.schedule else base

    @property
    def shares_rounds(self) -> bool:
        """Whether buckets share rounds of messages; those of torch's hooks do not."""
        return self.method not in OF_TORCH and self.reducer.shares_rounds

    @property
    def reducer(self) -> micro.Reducer:
        """What reduces the gradients; dense stands for torch's own."""
        return build_reducer(self.config)


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """What to measure, checked."""

    rates: list[str]
    num_hosts: int
    steps: int
    density: float
    setups: list[Setup]
    overrides: list[str]
    link_s: float
    seconds: float

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "NetworkSettings":
        """Read the options.

        Raises:
            UserError: a mistake.
        """
        rates = arguments.rates
        for rate in rates:
            bits_per_s(rate)
        if arguments.link_seconds < 1:
            raise UserError(f"--link-seconds must be at least 1, got {arguments.link_seconds:g}")
        overrides = arguments.overrides or DEFAULTS
        for word in overrides:
            if word.split("=")[0].split(".")[0] in SETTLED:
                raise UserError(f"'{word}': this benchmark sets it itself; see --methods and --density")
        words = [*overrides, f"density={arguments.density!r}"]
        setups = [_setup(word, words, arguments.hosts) for word in dict.fromkeys(arguments.methods)]
        return cls(
            rates=rates,
            num_hosts=arguments.hosts,
            steps=arguments.steps,
            density=arguments.density,
            setups=setups,
            overrides=words,
            link_s=float(arguments.link_seconds),
            seconds=float(arguments.seconds),
        )

    @property
    def title(self) -> str:
        """What was trained, on what."""
        config = self.setups[0].config
        where = f"batch {config.batch_size} on each of {self.num_hosts} hosts"
        return f"{config.model.name} on {config.dataset.name}, {where}, density {self.density:g}"


def _setup(word: str, overrides: list[str], num_hosts: int) -> Setup:
    method, _, wanted = word.partition(":")
    if wanted and method in OF_TORCH:
        raise UserError(f"{method} makes its own buckets, got '{word}': leave :{wanted} out")
    schedule = _schedule(wanted) if wanted else None
    words = [*overrides, f"schedule={wanted}"] if schedule and not schedule.is_planned else overrides
    return Setup(method, schedule, config_of(method, words, num_hosts), words)


def _schedule(name: str) -> Schedule:
    runnable = [name for name in micro.known(Schedule) if micro.build(Schedule, name).runs]
    if name not in runnable:
        raise UserError(f"a schedule must be one of {', '.join(runnable)}, got '{name}'{suggestion(name, runnable)}")
    return micro.build(Schedule, name)
