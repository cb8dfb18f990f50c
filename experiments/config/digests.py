"""Digests of the files that settings name: a run is of their content, wherever they are."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig

FILES = ("trace", "link", "select")  # keys of a schedule that name files


def complete_digests(config: TrainConfig) -> None:
    """Fill in the digests of the files of a schedule and of the checkpoint of ``start_from``, where they are there.

    Raises:
        UserError: the configuration says already what they are, and they are not.
    """
    for key, path, content in _contents(config):
        found = hashlib.sha256(content).hexdigest()[:12]
        if config.digests.get(key) not in (None, found):
            raise UserError(f"{key}={path} has other content than the run was made with: name the same, or a new run")
        config.digests[key] = found


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


def _ranks_of(path: Path) -> bytes:
    """Return what a checkpoint, or the newest one of a run, says of the files of its ranks."""
    newest = max(path.glob("checkpoints/step-*/CHECKPOINT.json"), default=path / "CHECKPOINT.json")
    return json.dumps(json.loads(newest.read_bytes())["ranks"]).encode()
