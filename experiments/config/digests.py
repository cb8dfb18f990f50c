"""Digests of the files that settings name: a run is of their content, wherever they are."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from experiments.config.errors import UserError
from experiments.config.schema import OWN_DATA, DatasetConfig, TrainConfig

FILES = ("trace", "link", "select")  # keys of a schedule that name files


def complete_digests(config: TrainConfig) -> None:
    """Fill in the digests of a user's own data, a schedule's files, and the checkpoint of ``start_from``.

    What is not there has none: it is missed before a worker starts.

    Raises:
        UserError: the configuration says already what they are, and they are not.
    """
    for key, path, content in _contents(config):
        _check(f"{key}={path}", config.digests.get(key), found := _digest(content))
        config.digests[key] = found
    dataset = config.dataset
    if own := _own_data(dataset):
        _check(f"dataset.root={dataset.root}", dataset.digest, found := _digest(own))
        dataset.digest = found


def _check(what: str, given: str | None, found: str) -> None:
    if given not in (None, found):
        raise UserError(
            f"{what} has other content than the run was made with ({found}, got {given}): name the same, or a new run"
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _contents(config: TrainConfig) -> Iterator[tuple[str, str, bytes]]:
    """Yield each such setting: its key, its path, and what stands for the content."""
    for name in FILES:
        path = getattr(config.schedule, name)
        with suppress(OSError):
            if path is not None:
                yield f"schedule.{name}", path, Path(path).read_bytes()
    if config.start_from is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            yield "start_from", config.start_from, _ranks_of(Path(config.start_from))


def _own_data(dataset: DatasetConfig) -> bytes | None:
    """Return what stands for the content of a user's own data, None for published data or where it is not there."""
    if dataset.name not in OWN_DATA or dataset.root is None or not Path(dataset.root).is_dir():
        return None
    import data  # imports torch

    with suppress(ValueError):
        return json.dumps(data.sums(dataset.name, dataset.root, **dataset.settings), sort_keys=True).encode()
    return None


def _ranks_of(path: Path) -> bytes:
    """Return what a checkpoint, or the newest one of a run, says of the files of its ranks."""
    newest = max(path.glob("checkpoints/step-*/CHECKPOINT.json"), default=path / "CHECKPOINT.json")
    return json.dumps(json.loads(newest.read_bytes())["ranks"]).encode()
