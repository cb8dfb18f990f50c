"""What ``experiments.bench network_rounds`` measures: the options, checked, and forms of local steps out of a study."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from experiments.config.compose import compose_runs
from experiments.config.errors import UserError, suggestion
from experiments.config.schema import TrainConfig
from experiments.config.values import Flat, flat
from experiments.ranks.hosts import bits_per_s
from experiments.reports.names import human, label
from experiments.reports.rounds_in_words import exchanged, interval, outer, short
from experiments.sweeps.study import jobs_of
from experiments.training.preflight import check_runs
from experiments.training.runner import num_steps

STUDY = "gpt_equal_tokens"
WARMUP = 4  # batches: DDP settles its buckets after the first step
SETTLED = ("sparsifier", "rounds", "accumulate", "cluster", "output")


@dataclass(frozen=True, slots=True)
class Way:
    """One form of the study: a method, and how many batches of a worker lie between two exchanges.

    Attributes:
        words: of its configuration, with hosts in the place of simulated workers.
    """

    name: str
    config: TrainConfig
    words: list[str]

    @property
    def settings(self) -> Flat:
        """Its configuration by dotted keys."""
        return flat(asdict(self.config))

    @property
    def exchanged(self) -> str:
        """What its workers exchange, and by what outer optimizer."""
        return ", ".join(filter(None, (exchanged(self.settings), outer(self.settings))))

    @property
    def title(self) -> str:
        """How it is called in tables and figures."""
        return f"{label(self.config.sparsifier.name)}, {short(self.settings) or self.exchanged}"

    @property
    def interval(self) -> int:
        """Batches of a worker in a round, 1 where every batch is followed by an exchange."""
        return interval(self.settings)

    @property
    def round_steps(self) -> int:
        """Steps of the training in a round: gradients that are added up are one step."""
        return self.interval // self.config.accumulate


@dataclass(frozen=True, slots=True)
class RoundsSettings:
    """What to measure, checked."""

    rates: list[str]
    num_hosts: int
    ways: list[Way]
    rounds: int
    batches: int

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "RoundsSettings":
        """Read the options.

        Raises:
            UserError: a mistake.
        """
        for rate in arguments.rates:
            bits_per_s(rate)
        for word in arguments.overrides:
            if word.split("=")[0].split(".")[0] in SETTLED:
                raise UserError(f"'{word}': this benchmark sets it itself; see --ways and --hosts")
        known = ways_of_study(arguments.overrides, arguments.hosts)
        chosen = [_chosen(known, name) for name in dict.fromkeys(arguments.ways)]
        settings = cls(arguments.rates, arguments.hosts, chosen, arguments.rounds, arguments.batches)
        check_runs(way.config for way in chosen)
        for way in chosen:
            settings._check_length(way)
        return settings

    def warm_rounds(self, way: Way) -> int:
        """Return how many rounds are not counted, at each rate."""
        return math.ceil(WARMUP / way.interval)

    def num_rounds(self, way: Way) -> int:
        """Return how many whole rounds are measured, at each rate."""
        return max(self.rounds, math.ceil(self.batches / way.interval))

    @property
    def title(self) -> str:
        """What is trained, on what."""
        config = self.ways[0].config
        where = f"batch {config.batch_size} on each of {self.num_hosts} hosts"
        return f"{human(config.model.name)} on {human(config.dataset.name)}, {where}"

    def _check_length(self, way: Way) -> None:
        needed = len(self.rates) * (self.warm_rounds(way) + self.num_rounds(way)) * way.round_steps
        there = num_steps(way.config)
        if needed > there:
            raise UserError(
                f"{way.name}: {needed} steps are to be measured at all rates, the training has {there}: lower --rounds "
                f"or --batches, or add epochs={math.ceil(needed * way.config.epochs / there)}"
            )


def ways_of_study(overrides: Sequence[str], num_hosts: int) -> dict[str, Way]:
    """Return the forms of the study by their names, trained on hosts."""
    of_hosts = ["cluster=local", f"cluster.nproc_per_node={num_hosts}", "output=unused", "measure_test_every=0"]
    jobs = [[*words, *of_hosts, *overrides] for words in jobs_of(STUDY, []) if "seed=0" in words]
    configs = compose_runs(jobs, joined_world_size=num_hosts)
    return {name_of(config): Way(name_of(config), config, words) for words, config in zip(jobs, configs, strict=True)}


def name_of(config: TrainConfig) -> str:
    """Return how a form is chosen: METHOD, METHOD:H for rounds, :nesterov with it outside, METHOD+N for sums of N."""
    rounds = config.rounds
    parts = [
        config.sparsifier.name,
        f"+{config.accumulate}" if config.accumulate > 1 else "",
        f":{rounds.every}" if rounds.every else "",
        ":nesterov" if rounds.nesterov else "",
    ]
    return "".join(parts)


def _chosen(known: dict[str, Way], name: str) -> Way:
    if name not in known:
        raise UserError(f"a way must be one of {', '.join(known)}, got '{name}'{suggestion(name, list(known))}")
    return known[name]
