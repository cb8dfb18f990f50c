"""Configurations of finished runs: flat, without repetitions, selected, and in what their experiments differ."""

import hashlib
import json
from collections.abc import Iterable, Mapping

import pandas as pd

from experiments.config.errors import UserError, suggestion
from experiments.config.identity import identity
from experiments.config.method_names import PARTS, method_name, own_settings
from experiments.config.schema import flat
from experiments.reports.finished_runs import FinishedRun
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
DRAWN = ("latent", "synthetic")  # data sets that follow from settings and seed
RULE = "sparsifier.selector.rule"  # only methods with a published and a repaired form have it
# Runs that agree in these, and differ in the seed alone, are repetitions of one experiment.
EXPERIMENT = ["model", "dataset", "world_size", "density", "sparsifier"]

Config = dict[str, object]
Selection = Mapping[str, list[str]]


def parse_selection(words: Iterable[str]) -> dict[str, list[str]]:
    """Turn ``["model=mlp", "seed=0,1"]`` into ``{"model": ["mlp"], "seed": ["0", "1"]}``."""
    selection = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not (key and equals and values):
            raise UserError(f"a selection is KEY=VALUE or KEY=VALUE,VALUE, got {word!r}")
        selection[key] = values.split(",")
    return selection


def selected_configs(found: Mapping[str, FinishedRun], selection: Selection) -> dict[str, Config]:
    """Return the flat configurations, by name, that fit a selection; one that is there twice is left out.

    Raises:
        UserError: a selection that fits none, or a broken configuration.
    """
    configs = {name: _read_config(run) for name, run in found.items()}
    return _select(_distinct(_with_digests(configs, found)), selection)


UNSAID = {("accumulate", 1)}  # beside runs with more: each batch is a step
UNSET = object()  # a setting that a configuration leaves to its part


def planned(plan: Mapping[str, Mapping[str, object]]) -> list[Config]:
    """Return the flat configurations of runs that a study plans as those of finished runs are read."""
    return [_without_density({key: _plain(value) for key, value in config.items()}) for config in plan.values()]


def run_frame(configs: dict[str, Config]) -> pd.DataFrame:
    """Return a row per run: run, the keys of COLUMNS, accumulate, rule and variant; see Frames."""
    rows = [
        {"run": name}
        | {column: _value(config, column) for column in COLUMNS}
        | {"accumulate": config.get("accumulate", 1), "rule": config.get(RULE)}
        for name, config in configs.items()
    ]
    frame = pd.DataFrame(rows).astype({"density": float, "world_size": int, "seed": int})
    frame["variant"] = ""
    for _, group in frame.groupby(EXPERIMENT):
        names = list(group["run"])
        told = [{f"sparsifier.{key}" for key in own_settings(_sparsifier(configs[name]))} for name in names]
        frame.loc[group.index, "variant"] = _variants([_settings(configs[name]) for name in names], told)
    return frame


def _read_config(run: FinishedRun) -> Config:
    config = {key: _plain(value) for key, value in flat(run.config()).items()}
    missing = [key for key in COLUMNS.values() if key not in config]
    if missing:
        raise UserError(f"{run.place('configuration')} has no {', '.join(missing)}; {run.remedy}")
    return _without_density(config)


def _with_digests(configs: dict[str, Config], found: Mapping[str, FinishedRun]) -> dict[str, Config]:
    """Return the configurations with a ``dataset.digest`` where runs of one data set read files of other content."""
    sums = {name: found[name].manifest().get("data_checksums") or {} for name in configs}
    contents: dict[tuple[object, str], set[object]] = {}
    for name, config in configs.items():
        for file, checksum in _files(config, sums[name]):
            contents.setdefault((config["dataset.name"], file), set()).add(checksum)
    several = {key for key, checksums in contents.items() if len(checksums) > 1}
    apart = {
        name: config
        | {"dataset.digest": hashlib.sha256(json.dumps(sums[name], sort_keys=True).encode()).hexdigest()[:12]}
        for name, config in configs.items()
        if any((config["dataset.name"], file) in several for file, _ in _files(config, sums[name]))
    }
    return configs | apart


def _files(config: Config, sums: object) -> list[tuple[str, object]]:
    """Return the checksums in the manifest of a run, none where its digest or its seed says more."""
    known = config.get("dataset.digest") or config["dataset.name"] in DRAWN
    return list(sums.items()) if isinstance(sums, dict) and not known else []


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
    own = {key: value for key, value in identity(config).items() if key != "sparsifier.name"}
    own = {f"{key}.name" if _is_part(key) else key: value for key, value in own.items()}
    return own | {"sparsifier": _value(config, "sparsifier")}


def _is_part(key: str) -> bool:
    return key.startswith("sparsifier.") and key.rpartition(".")[2] in PARTS


def _distinct(configs: dict[str, Config]) -> dict[str, Config]:
    """Leave out a run whose settings and seed another one has already: it is no independent repetition."""
    first: dict[str, str] = {}
    for name, config in configs.items():
        settings = json.dumps(_settings(config), sort_keys=True, default=str)
        if first.setdefault(settings, name) != name:
            print(f"left out, same experiment and seed as {first[settings]}: {name}")
    return {name: configs[name] for name in first.values()}


def _select(configs: dict[str, Config], selection: Selection) -> dict[str, Config]:
    for key, values in selection.items():
        known = {known for config in configs.values() for known in (*COLUMNS, *config)}
        if key not in known:
            raise UserError(f"no run has the key {key!r}{suggestion(key, known)}")
        kept = {name: config for name, config in configs.items() if _fits(config, key, values)}
        if not kept:
            present = sorted({str(_value(config, key)) for config in configs.values()})
            raise UserError(f"{key}={','.join(values)} fits no run; present: {', '.join(present)}")
        configs = kept
    return configs


def _fits(config: Config, key: str, values: list[str]) -> bool:
    if key == "density" and _value(config, "sparsifier") == "dense":
        return True  # the baseline belongs to every density
    return any(_same(_value(config, key), text) for text in values)


def _value(config: Config, key: str) -> object:
    if key == "sparsifier":
        return method_name(_sparsifier(config))
    return config.get(COLUMNS.get(key, key))


def _sparsifier(config: Config) -> Config:
    return {key.removeprefix("sparsifier."): value for key, value in config.items() if key.startswith("sparsifier.")}


def _same(value: object, text: str) -> bool:
    try:
        return float(str(value)) == float(text)
    except ValueError:
        return str(value).lower() == text.lower()


def _variants(configs: list[Config], told: list[set[str]]) -> list[str]:
    """Name, for each of ``configs``, the settings beside the seed in which not all are equal, and those ``told``."""
    keys = sorted({key for config in configs for key in config} - {"seed"})
    differing = [key for key in keys if len({str(config.get(key, UNSET)) for config in configs}) > 1]
    rounds = [short(config) if any(key.startswith(ROUNDS) for key in differing) else "" for config in configs]
    differing = [key for key in differing if not key.startswith(ROUNDS)]
    chosen = [key.removesuffix(".name") for key in differing if key.endswith(".name")]
    # Once the name of a choice differs, its other settings follow from it.
    keys = [key for key in differing if not key.startswith(tuple(f"{choice}." for choice in chosen))]
    named = [(choice, f"{choice}.name") for choice in chosen] + [(key, key) for key in keys]
    extra = [(key, key) for key in sorted({key for own in told for key in own} - set(differing))]
    words = [
        [
            f"{word.rpartition('.')[2]}={'null' if config[key] is None else config[key]}"
            for word, key in [*named, *((word, key) for word, key in extra if key in own)]
            if key in config and (key, config[key]) not in UNSAID
        ]
        for config, own in zip(configs, told, strict=True)
    ]
    return [", ".join(filter(None, [*own, of_rounds])) for own, of_rounds in zip(words, rounds, strict=True)]
