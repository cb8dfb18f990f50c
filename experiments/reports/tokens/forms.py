"""The forms of a study of language models: its runs that differ in the seed alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.config.identity import identity
from experiments.reports.names import label
from experiments.reports.rounds_in_words import exchanged, outer
from experiments.reports.run_configs import Config

Plan = Mapping[str, Config]  # the runs of a study by name, with their flat configurations, in its order


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Runs of a study that differ in the seed alone.

    Attributes:
        config: the flat configuration of one of them.
        runs: the names of all that the study has.
    """

    config: Config
    runs: tuple[str, ...]

    @property
    def method(self) -> str:
        """The key of its sparsifier."""
        return str(self.config["sparsifier.name"])

    @property
    def exchanged(self) -> str:
        """What its workers exchange, and by what outer optimizer."""
        return ", ".join(word for word in (exchanged(self.config), outer(self.config)) if word)

    @property
    def density(self) -> float:
        """What was asked for, 1 for a form that sends everything."""
        return 1.0 if self.method == "dense" else float(str(self.config["density"]))

    @property
    def rate(self) -> float:
        """The largest learning rate of its inner optimizer."""
        return float(str(self.config["lr"]))

    @property
    def passes(self) -> int:
        """How often each worker sees its data."""
        return int(str(self.config["epochs"]))

    @property
    def name(self) -> str:
        """The form in a sentence."""
        return f"{label(self.method)}, {self.exchanged}"

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return int(str(self.config["cluster.world_size"]))

    @property
    def step_tokens(self) -> int:
        """What all workers together see in one optimizer step, or in one of their own."""
        keys = ("batch_size", "dataset.sequence_length", "accumulate")
        factors = [int(str(self.config[key])) for key in keys]
        return self.world_size * factors[0] * factors[1] * factors[2]

    @property
    def is_simulated(self) -> bool:
        """Whether all its workers are in one process."""
        return self.config["cluster.name"] == "simulated"

    @property
    def batch_size(self) -> int:
        """Sequences in a batch of a worker."""
        return int(str(self.config["batch_size"]))

    @property
    def batches(self) -> int:
        """How many batches a worker takes in a step."""
        return int(str(self.config["accumulate"]))


def forms_of(plan: Plan) -> list[Form]:
    """Return the forms of a study in its order."""
    found: dict[str, list[str]] = {}
    for run, config in plan.items():
        settings = {key: value for key, value in identity(config).items() if key != "seed"}
        found.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    return [Form(config=plan[runs[0]], runs=tuple(runs)) for runs in found.values()]
