"""Check, before any run starts, its output folder, whether it is there twice, and what it lacks if it is finished."""

import dataclasses
import glob
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.config.errors import UserError
from experiments.config.identity import identity
from experiments.config.keys import flat
from experiments.config.schema import TrainConfig
from experiments.runs.checkpoints import published
from experiments.runs.files import check_folder
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, state_of

_INTERVALS = {"measure_residual_every": "residual", "measure_test_every": "loss on the test set within epochs"}


def check_outputs(configs: Iterable[TrainConfig], *, by_writing: bool = True) -> None:
    """Try the output folder of each run by writing; or see only whether it is a folder. Raises: UserError."""
    for output in dict.fromkeys(Path(config.output) for config in configs):
        check_folder(output, "output", by_writing=by_writing)


def distinct(jobs: list[list[str]], configs: list[TrainConfig]) -> tuple[list[list[str]], list[TrainConfig]]:
    """Return each run once: for a method that sends everything, all densities of the grid are the same run.

    Raises: UserError: two runs of another method would share a folder.
    """
    first: dict[Path, int] = {}
    for number, config in enumerate(configs):
        path = folder_of(config).path
        before = first.setdefault(path, number)
        if before != number and not config.sparsifier.sends_everything:
            differ = sorted(set(jobs[before]) ^ set(jobs[number]))
            how = f"{' '.join(differ)} makes no difference" if differ else "they are the same"
            raise UserError(f"two runs would share the folder {path.name}: {how}; name each combination once")
    return [jobs[number] for number in first.values()], [configs[number] for number in first.values()]


def check_requests(configs: Sequence[TrainConfig]) -> None:
    """Refuse runs of which some are finished, and have not what is asked for. Raises: UserError: the first of them."""
    for config in configs:
        folder = folder_of(config)
        if state_of(folder) == State.DONE and (line := unmet_request(config, folder)):
            raise UserError(f"{folder.path.name}: {line}")


def note_of_other_epochs(config: TrainConfig) -> str:
    """Return a line where a run is new, and finished with another number of epochs alone; else empty."""
    if folder_of(config).path.exists():
        return ""
    for epochs, folder in finished_with_other_epochs(config).items():
        remedy = " (resume=extend goes on from its end)" if published(folder) else ""
        return (
            f"{folder.path.name} is finished with epochs={epochs}; the same with epochs={config.epochs} "
            f"is a run of its own, and trains from the first step{remedy}"
        )
    return ""


def finished_with_other_epochs(config: TrainConfig) -> dict[int, RunFolder]:
    """Return the finished runs that differ from a run in their number of epochs alone, by it, longest first.

    Of several with one number, as after a rerun, it is one that kept its last checkpoint.
    """
    own, found = folder_of(config).path, {}
    wanted = _without_epochs(dataclasses.asdict(config))
    paths = own.parent.glob(f"{glob.escape(own.name.rpartition('-')[0])}-*")
    for path in sorted(paths, key=lambda path: bool(published(RunFolder(path)))):
        with suppress(ValueError):  # a damaged run is no finished one
            saved = (other := RunFolder(path)).config()
            if other.is_done() and _without_epochs(saved) == wanted:
                found[int(saved["epochs"])] = other
    return {epochs: found[epochs] for epochs in sorted(found, reverse=True) if epochs != config.epochs}


def _without_epochs(config: dict[str, Any]) -> str:
    return json.dumps(identity(flat(config)) | {"epochs": None}, sort_keys=True, default=str)


def unmet_request(config: TrainConfig, folder: RunFolder) -> str:
    """Return why a finished run cannot have what ``config`` asks for and its own did not, empty where it has all."""
    saved = folder.config()
    lacks: dict[str, str] = {}  # what was not done -> the word that asks for it
    if config.save_weights and not folder.weights_path.exists():
        lacks["its weights were not saved"] = "save_weights=true"
    if config.checkpoint.at_end and not published(folder):
        lacks["kept no checkpoint"] = "checkpoint.at_end=true"
    for key, what in _INTERVALS.items():
        every, before = getattr(config, key), saved.get(key) or 0
        if every and (not before or every % before):
            lacks[f"its {what} was measured {f'in every {before}. step' if before else 'never'}"] = f"{key}={every}"
    if config.peak_tflops is not None and saved.get("peak_tflops") is None:
        lacks["its utilisation was not measured"] = f"peak_tflops={config.peak_tflops:g}"
    if lacks:
        why, word = next(iter(lacks.items()))
        again = f"python -m experiments.sweep rerun {folder.path} {word}"
        return f"the run is finished and {why}: repeat it in a folder of its own with {again}, or leave out {word}"
    tracked = (saved.get("tracking") or {}).get("name", "none") != "none" or any(folder.path.glob("wandb/*run-*"))
    if config.tracking.name != "none" and not tracked:
        again = f"python -m experiments.track {folder.path} --mode {config.tracking.mode}"
        return f"the run is finished and was not mirrored: make the mirror with {again}, or leave out tracking"
    return ""
