"""Flatten, deduplicate and select the configurations of finished runs, and find how experiments differ."""

import json
from collections.abc import Iterable, Mapping

import pandas as pd

from experiments.config.errors import UserError, suggestion
from experiments.config.identity import identity
from experiments.config.keys import flat
from experiments.config.method_names import PARTS, method_name, own_settings
from experiments.reports.finished_runs import FinishedRun
from experiments.reports.names import human
from experiments.reports.rounds_in_words import ROUNDS, short

# column of the run table -> key of config.yaml
COLUMNS = {
    "model": "model.name",
    "dataset": "dataset.name",
    "sparsifier": "sparsifier.name",
    "density": "density",
    "seed": "seed",
    "cluster": "cluster.name",
    "world_size": "cluster.world_size",
    "epochs": "epochs",
    "batch_size": "batch_size",
}
# Runs that agree in these, and differ in the seed alone, are repetitions of one experiment.
EXPERIMENT = ["model", "dataset", "world_size", "density", "sparsifier"]
USUAL = {"accumulate": 1}  # beside runs with more: each batch is a step

Config = dict[str, object]
Selection = Mapping[str, list[str]]


def parse_selection(words: Iterable[str]) -> dict[str, list[str]]:
    """Turn ``["model=mlp", "seed=0,1"]`` into ``{"model": ["mlp"], "seed": ["0", "1"]}``."""
    selection = {key: values for key, _, values in (word.partition("=") for word in words)}
    if not all(key and values for key, values in selection.items()):
        raise UserError(f"a selection is KEY=VALUE or KEY=VALUE,VALUE, got {' '.join(words)}")
    return {key: values.split(",") for key, values in selection.items()}


def selected_configs(found: Mapping[str, FinishedRun], selection: Selection) -> dict[str, Config]:
    """Return the flat configurations, by name, that fit a selection.

    A run whose settings and seed another one has already is left out: it is no independent repetition.

    Raises:
        UserError: a selection that fits none, or a broken configuration.
    """
    first: dict[str, str] = {}
    configs = {}
    for name, run in found.items():
        config = _read_config(run)
        settings = json.dumps(_settings(config), sort_keys=True, default=str)
        if first.setdefault(settings, name) == name:
            configs[name] = config
        else:
            print(f"left out, same experiment and seed as {first[settings]}: {name}")
    return _select(configs, selection)


def planned(plan: Mapping[str, Mapping[str, object]]) -> list[Config]:
    """Return the flat configurations of runs that a study plans as those of finished runs are read."""
    return [_without_density({key: _plain(value) for key, value in config.items()}) for config in plan.values()]


def run_frame(configs: dict[str, Config]) -> pd.DataFrame:
    """Return a row per run: run, the keys of COLUMNS, accumulate and variant; see Frames."""
    rows = [
        {"run": name, **{column: _value(config, column) for column in COLUMNS}}
        | {"accumulate": config.get("accumulate", 1)}
        for name, config in configs.items()
    ]
    frame = pd.DataFrame(rows).astype({"density": float, "world_size": int, "seed": int}).assign(variant="")
    for _, group in frame.groupby(EXPERIMENT):
        frame.loc[group.index, "variant"] = _variants([configs[name] for name in group["run"]])
    return frame


def _read_config(run: FinishedRun) -> Config:
    config = {key: _plain(value) for key, value in flat(run.config).items()}
    missing = [key for key in COLUMNS.values() if key not in config]
    if missing:
        raise UserError(f"{run.place('configuration')} has no {', '.join(missing)}; {run.remedy}")
    return _without_density(config)


def _without_density(config: Config) -> Config:
    # A dense run has no density: its setting only shows which sweep it belongs to.
    return config | {"density": 1.0} if _value(config, "sparsifier") == "dense" else config


def _plain(value: object) -> object:
    """Return a setting as all sources have it: JSON does not tell 1.0 from 1."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _settings(config: Config) -> Config:
    """Return what tells a run from others, by the method that it trains with; a part's name has one key."""
    own = {
        f"{key}.name" if key.startswith("sparsifier.") and key.rpartition(".")[2] in PARTS else key: value
        for key, value in identity(config).items()
        if key != "sparsifier.name"
    }
    return own | {"sparsifier": _value(config, "sparsifier")}


def _select(configs: dict[str, Config], selection: Selection) -> dict[str, Config]:
    for key, values in selection.items():
        known = {known for config in configs.values() for known in (*COLUMNS, *config)}
        if key not in known:
            raise UserError(f"no run has the key {key!r}{suggestion(key, known)}")
        kept = {name: config for name, config in configs.items() if _fits(config, key, values)}
        if not kept:
            present = sorted({_text(config, key) for config in configs.values()})
            raise UserError(f"{key}={','.join(values)} fits no run; present: {', '.join(present)}")
        configs = kept
    return configs


def _fits(config: Config, key: str, values: list[str]) -> bool:
    if key == "density" and _value(config, "sparsifier") == "dense":
        return True  # the baseline belongs to every density
    return not {*map(_comparable, values)}.isdisjoint([_comparable(_text(config, key))])


def _comparable(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text.lower()


def _value(config: Config, key: str) -> object:
    return method_name(_sparsifier(config)) if key == "sparsifier" else config.get(COLUMNS.get(key, key))


def _text(config: Config, key: str) -> str:
    value = _value(config, key)
    return "null" if value is None else str(value)


def _sparsifier(config: Config) -> Config:
    return {key.removeprefix("sparsifier."): value for key, value in config.items() if key.startswith("sparsifier.")}


def _follows(key: str, choice: str, settings: list[Config]) -> bool:
    """Return whether a setting of a choice, such as ``optimizer.``, is the same wherever the choice is."""
    pairs = {(str(own.get(f"{choice}name")), str(own.get(key, ...))) for own in settings}
    return key.startswith(choice) and len(pairs) == len({name for name, _ in pairs})


def _variants(configs: list[Config]) -> list[str]:
    """Name, for each run of one experiment, the settings beside the seed in which they differ, and its method's own."""
    settings = [_settings(config) for config in configs]
    keys = sorted({key for own in settings for key in own} - {"seed"})
    differing = [key for key in keys if len({str(own.get(key, ...)) for own in settings}) > 1]
    has_rounds = any(key.startswith(ROUNDS) for key in differing)
    differing = [key for key in differing if not key.startswith(ROUNDS)]
    chosen = tuple(key.removesuffix("name") for key in differing if key.endswith(".name"))
    # Once the name of a choice differs, its other settings follow from it, but for those that differ with one name.
    named = [
        *(f"{choice}name" for choice in chosen),
        *(key for key in differing if not any(_follows(key, choice, settings) for choice in chosen)),
    ]
    words = []
    for config, own in zip(configs, settings, strict=True):
        of_parts = {f"sparsifier.{key}" for key in own_settings(_sparsifier(config))} - set(differing)
        shown = [key for key in [*named, *sorted(of_parts)] if key in own and USUAL.get(key, ...) != own[key]]
        named_values = ((key.removesuffix(".name").rpartition(".")[2], own[key]) for key in shown)
        texts = [f"{word}={'null' if value is None else human(str(value))}" for word, value in named_values]
        words.append(", ".join(filter(None, [*texts, short(own) if has_rounds else ""])))
    return words
