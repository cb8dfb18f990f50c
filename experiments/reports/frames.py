"""Runs as tidy tables: all that a figure or a table ever reads (docs/run_folders.md has the schema).

They are read from run folders here, and from W&B in sources.py.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pandas as pd
import yaml

from experiments.config.errors import UserError, suggestion
from experiments.config.identity import is_neutral
from experiments.reports.measures import METRICS, metric_of
from experiments.runs.json_lines import Row, read_records
from experiments.runs.run_folder import RunFolder

STAGES = ("compute", "select", "exchange", "rest")
STEP_NUMBERS = (
    *("step", "epoch", "loss", "lr", "target_density", "density", "local_density", "density_error", "build_up"),
    *("imbalance", "threshold", "relative_error", "residual_norm"),
    *("bytes_sent", "counts_bytes", "indices_bytes", "values_bytes"),
    *("compute_s", "select_s", "exchange_s", "rest_s", "hidden_s", "step_s", "time_s"),
)
EPOCH_NUMBERS = (
    *("epoch", "step", "time_s", "train_loss", "test_loss", "num_samples"),
    *(metric.key for metric in METRICS),
)

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
RULE = "sparsifier.selector.rule"  # only methods with a published and a repaired form have it
# Runs that agree in these, and differ in the seed alone, are repetitions of one experiment.
EXPERIMENT = ["model", "dataset", "world_size", "density", "sparsifier"]

METHOD = ["sparsifier", "variant"]  # what one line of a figure stands for

Config = dict[str, object]
Selection = Mapping[str, list[str]]
Reader = Callable[["FinishedRun", str], pd.DataFrame]


class FinishedRun(Protocol):
    """One finished run, wherever its records are.

    Attributes:
        remedy: what to do where they are broken.
    """

    @property
    def remedy(self) -> str: ...  # noqa: D102

    def config(self) -> Mapping[str, object]:
        """Return its configuration, nested as in config.yaml."""

    def rows(self, kind: str) -> list[Row]:
        """Return the rows of ``steps`` or ``epochs``. Raises: UserError when they cannot be read."""

    def place(self, kind: str) -> str:
        """Return what to call where its configuration, steps or epochs are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """Finished runs of one source; ``steps`` and ``epochs`` carry the columns of ``runs``.

    ``runs`` has one row per run: run, the keys of COLUMNS, accumulate, rule, and ``variant``, which is empty unless
    runs of one experiment differ in more than the seed; it then names that difference, ``lr=0.1``. The density of
    a dense run is 1, whatever its configuration says. ``epochs`` has a column for every one of METRICS, NaN where a run
    does not measure it, and ``metric``, the key of the one that stands for the run.
    """

    runs: pd.DataFrame
    steps: pd.DataFrame
    epochs: pd.DataFrame


def runs(root: Path | str) -> pd.DataFrame:
    """One row per finished run under ``root``. Raises: UserError when there is none."""
    return _run_frame(_distinct(_configs(_in_folders(Path(root)))))


def steps(root: Path | str) -> pd.DataFrame:
    """One row per run and step. Raises: UserError when no run is finished or a record cannot be read."""
    return load(root).steps


def epochs(root: Path | str) -> pd.DataFrame:
    """One row per run and epoch. Raises: UserError when no run is finished or a record cannot be read."""
    return load(root).epochs


def load(root: Path | str, selection: Selection | None = None) -> Frames:
    """Read every finished run under ``root`` whose configuration fits ``selection``.

    Raises:
        UserError: no finished run, a selection that fits none, a broken configuration or record.
    """
    return tidy(_in_folders(Path(root)), selection)


def tidy(found: Mapping[str, FinishedRun], selection: Selection | None = None) -> Frames:
    """Read the runs, by their names, whose configuration fits ``selection``; one that is there twice is left out.

    A number of a configuration that is whole is an integer, whether 1 or 1.0 was written. The columns that are not
    known by name come last, in the order of the alphabet.

    Raises:
        UserError: a selection that fits none, a broken configuration or record.
    """
    configs = _select(_distinct(_configs(found)), selection or {})
    table = _run_frame(configs)
    identity = table.drop(columns=["rule", "epochs", "accumulate"])
    return Frames(
        runs=table,
        steps=_records(found, identity, "steps", STEP_NUMBERS, _read).pipe(_complete_steps),
        epochs=_records(found, identity.assign(rule=table["rule"]), "epochs", EPOCH_NUMBERS, _read_epochs),
    )


def parse_selection(words: Iterable[str]) -> dict[str, list[str]]:
    """Turn ``["model=mlp", "seed=0,1"]`` into ``{"model": ["mlp"], "seed": ["0", "1"]}``."""
    selection = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not (key and equals and values):
            raise UserError(f"--select takes key=value or key=value,value, got {word!r}")
        selection[key] = values.split(",")
    return selection


@dataclass(frozen=True, slots=True)
class _FolderRun:
    path: Path

    @property
    def remedy(self) -> str:
        return f"delete the folder {self.path} and run it again"

    def config(self) -> Mapping[str, object]:
        return yaml.safe_load((self.path / "config.yaml").read_text()) or {}

    def rows(self, kind: str) -> list[Row]:
        rows = read_records(self.path / f"{kind}.jsonl")
        end = {"steps": self._ending("step") - 1, "epochs": self._ending("epoch")}[kind]
        last = rows[-1].get(kind[:-1], end) if rows else end  # no rows at all are told where they are missed
        if end >= 0 and last != end:
            raise UserError(f"{self.place(kind)} ends at {kind[:-1]} {last}, the run at {end}; {self.remedy}")
        return rows

    def _ending(self, key: str) -> int:
        """Return what DONE says of the end; -1 where it says nothing."""
        path = self.path / "DONE"
        try:
            return int(json.loads(path.read_text()).get(key, -1))
        except (OSError, ValueError, AttributeError, TypeError):
            raise UserError(f"{path} is not whole; {self.remedy}") from None

    def place(self, kind: str) -> str:
        return str(self.path / ("config.yaml" if kind == "configuration" else f"{kind}.jsonl"))


def _in_folders(root: Path) -> dict[str, FinishedRun]:
    """Return the finished runs under a folder by name; tells what is left out."""
    folders = [RunFolder(path.parent) for path in sorted(root.glob("*/config.yaml"))]
    done = [folder.path for folder in folders if folder.is_done()]
    unfinished = [_unfinished_name(folder) for folder in folders if not folder.is_done()]
    if not done:
        also = f" ({len(unfinished)} unfinished)" if unfinished else ""
        raise UserError(f"{root} holds no finished run{also}; make some with: python -m experiments.train")
    if unfinished:
        print(f"left out, not finished: {', '.join(unfinished)}")
    return {folder.name: _FolderRun(folder) for folder in done}


def _unfinished_name(folder: RunFolder) -> str:
    return f"{folder.path.name} (failed)" if folder.failure_path.exists() else folder.path.name


def _configs(found: Mapping[str, FinishedRun]) -> dict[str, Config]:
    return {name: _read_config(run) for name, run in found.items()}


def _read_config(run: FinishedRun) -> Config:
    config = {key: _plain(value) for key, value in _flatten(run.config()).items()}
    missing = [key for key in COLUMNS.values() if key not in config]
    if missing:
        raise UserError(f"{run.place('configuration')} has no {', '.join(missing)}; {run.remedy}")
    # A dense run has no density: the value it was started with only says which sweep it came from.
    return config | {"density": 1.0} if config["sparsifier.name"] == "dense" else config


def _plain(value: object) -> object:
    """Return a setting as all sources have it: JSON does not tell 1.0 from 1."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flatten(node: Mapping[str, object], prefix: str = "") -> Config:
    flat: Config = {}
    for key, value in node.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _settings(config: Config) -> Config:
    return {key: value for key, value in config.items() if not is_neutral(key)}


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
            raise UserError(f"--select {key}={','.join(values)} fits no run; present: {', '.join(present)}")
        configs = kept
    return configs


def _fits(config: Config, key: str, values: list[str]) -> bool:
    if key == "density" and config["sparsifier.name"] == "dense":
        return True  # the baseline belongs to every density
    return any(_same(_value(config, key), text) for text in values)


def _value(config: Config, key: str) -> object:
    return config.get(COLUMNS.get(key, key))


def _same(value: object, text: str) -> bool:
    try:
        return float(str(value)) == float(text)
    except ValueError:
        return str(value).lower() == text.lower()


def _run_frame(configs: dict[str, Config]) -> pd.DataFrame:
    rows = [
        {"run": name}
        | {column: config[key] for column, key in COLUMNS.items()}
        | {"accumulate": config.get("accumulate", 1), "rule": config.get(RULE)}
        for name, config in configs.items()
    ]
    frame = pd.DataFrame(rows).astype({"density": float, "world_size": int, "seed": int})
    frame["variant"] = ""
    for _, group in frame.groupby(EXPERIMENT):
        names = list(group["run"])
        frame.loc[group.index, "variant"] = _variants([_settings(configs[name]) for name in names])
    return frame


def _variants(configs: list[Config]) -> list[str]:
    """Name, for each of ``configs``, the settings beside the seed in which they are not all equal."""
    keys = sorted({key for config in configs for key in config} - {"seed"})
    differing = [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
    chosen = [key.removesuffix(".name") for key in differing if key.endswith(".name")]
    # Once the name of a choice differs, its other settings follow from it.
    keys = [key for key in differing if not key.startswith(tuple(f"{choice}." for choice in chosen))]
    named = [(choice, f"{choice}.name") for choice in chosen] + [(key, key) for key in keys]
    return [", ".join(f"{short.rpartition('.')[2]}={config.get(key)}" for short, key in named) for config in configs]


def _records(
    found: Mapping[str, FinishedRun], table: pd.DataFrame, kind: str, numbers: tuple[str, ...], read: Reader
) -> pd.DataFrame:
    """Rows of one kind of all runs, every column of ``numbers`` as float, joined with the run table."""
    rows = pd.concat([read(found[run], kind).assign(run=run) for run in table["run"]], ignore_index=True)
    rows = rows.reindex(columns=list(dict.fromkeys(["run", *numbers, *sorted(rows.columns)])))
    rows[list(numbers)] = rows[list(numbers)].apply(pd.to_numeric).astype(float)
    # A resumed run may have repeated steps after its last checkpoint: the later row is the one that counts.
    rows = rows.drop_duplicates(["run", numbers[0]], keep="last")
    own = table.rename(columns={"density": "asked_density"})
    return rows.merge(own, on="run", validate="many_to_one").sort_values(["run", numbers[0]], ignore_index=True)


def _read(run: FinishedRun, kind: str) -> pd.DataFrame:
    rows = run.rows(kind)
    if not rows:
        raise UserError(f"{run.place(kind)} has no rows; {run.remedy}")
    return pd.DataFrame(rows)


def _read_epochs(run: FinishedRun, kind: str) -> pd.DataFrame:
    rows = _read(run, kind)
    try:
        return rows.assign(metric=metric_of(rows.columns).key)
    except UserError as error:
        raise UserError(f"{run.place(kind)}: {error}; {run.remedy}") from None


def _complete_steps(rows: pd.DataFrame) -> pd.DataFrame:
    skipped = rows["skipped"] if "skipped" in rows else pd.Series(False, index=rows.index)
    rule = rows["rule"] if "rule" in rows else pd.Series(None, index=rows.index, dtype=object)
    return rows.assign(skipped=skipped.eq(True), rule=rule).astype({"step": int, "epoch": int})
