"""What a command asks of a run beside its result, and cannot have when the run is finished without it."""

from collections.abc import Sequence

import yaml

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, state_of

MEASURED = {"measure_residual_every": "residual", "measure_test_every": "loss on the test set within epochs"}


def check_requests(configs: Sequence[TrainConfig]) -> None:
    """Refuse runs of which some are finished, and have not what is asked for. Raises: UserError: the first of them."""
    folders = [(config, folder_of(config)) for config in configs]
    done = [(config, folder) for config, folder in folders if state_of(folder) == State.DONE]
    unmet = [f"{folder.path.name}: {line}" for config, folder in done if (line := unmet_request(config, folder))]
    if unmet:
        raise UserError(unmet[0] + (f" ({len(unmet) - 1} more runs are like it)" if unmet[1:] else ""))


def unmet_request(config: TrainConfig, folder: RunFolder) -> str:
    """Return why a finished run cannot have what ``config`` asks for and its own did not, empty where it has all."""
    saved = yaml.safe_load(folder.config_path.read_text())
    saved = saved if isinstance(saved, dict) else {}
    if config.save_weights and not folder.weights_path.exists():
        return _repeat(folder, "its weights were not saved", "save_weights=true")
    for key, what in MEASURED.items():
        every, before = getattr(config, key), saved.get(key) or 0
        if every and (not before or every % before):
            had = f"in every {before}. step" if before else "never"
            return _repeat(folder, f"its {what} was measured {had}", f"{key}={every}")
    if config.peak_tflops is not None and saved.get("peak_tflops") is None:
        return _repeat(folder, "its utilisation was not measured", f"peak_tflops={config.peak_tflops:g}")
    tracked = (saved.get("tracking") or {}).get("name", "none") != "none" or any(folder.path.glob("wandb/*run-*"))
    if config.tracking.name != "none" and not tracked:
        again = f"python -m experiments.track {folder.path} --mode {config.tracking.mode}"
        return f"the run is finished and was not mirrored: make the mirror with {again}, or leave out tracking"
    return ""


def _repeat(folder: RunFolder, why: str, word: str) -> str:
    again = f"python -m experiments.sweep rerun {folder.path} {word}"
    return f"the run is finished and {why}: repeat it in a folder of its own with {again}, or leave out {word}"
