"""The identity of a run: a hash of all settings that change its results, at the end of its name.

A run keeps its name and folder when the schema gets a new key, see ``ADDED``. A file in a setting is identified by its
content hash, wherever it is.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.config.errors import UserError
from experiments.config.keys import Flat, flat
from experiments.config.method_names import method_of
from experiments.config.schema import OWN_DATA, SIMULATED, DatasetConfig, RoundsConfig, TrainConfig

NEUTRAL = frozenset(  # settings of machines and launchers; they do not change what a run computes
    {  # threads and machines change the rounding of sums: the manifest has both
        *("output", "dataset.root", "cluster.nproc_per_node", "cluster.nnodes", "cluster.rdzv_endpoint"),
        *("cluster.max_restarts", "cluster.slurm", "cluster.num_threads", "cluster.timeout_s"),
        *("checkpoint", "save_weights", "tracking", "peak_tflops", "resume"),
        *("measure_residual_every", "measure_test_every"),
    }
)

ADDED: Mapping[str, Any] = {
    "dataset.digest": None,
    "dataset.drawn": 0,
    "digests": {},
    "optimizer.clip_norm": "rank",
    "optimizer.max_steps": 1,
    "lr_end": 0.0,
    **{f"rounds.{key}": value for key, value in vars(RoundsConfig()).items()},
}
"""Settings that were added after names of runs were fixed, with what a run without them did.

With these values they are not in the hash. A new setting is added here, or all names change.
"""

_DIGESTS = "digests."


def is_neutral(key: str) -> bool:
    """Return whether a dotted key is a neutral setting, or part of one."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in NEUTRAL for length in range(1, len(parts) + 1))


def identity(settings: Mapping[str, Any]) -> Flat:
    """Return the settings, by dotted keys, that identify a run: without neutral ones and values of ``ADDED``."""
    found = {
        key: value
        for key, value in settings.items()
        if not is_neutral(key) and not (key in ADDED and ADDED[key] == value)
    }
    if found.get("cluster.name", SIMULATED) != SIMULATED:
        found["cluster.name"] = "local"  # real workers compute the same on every cluster
    of_files = {key.removeprefix(_DIGESTS): found.pop(key) for key in list(found) if key.startswith(_DIGESTS)}
    return found | of_files


def run_name(config: TrainConfig) -> str:
    """Return the run's folder name: readable, and ending in a hash of its identity."""
    settings = identity(flat(dataclasses.asdict(config)))
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    method = f"{method_of(config)}-d{config.density:g}"
    return f"{config.model.name}-{config.dataset.name}-{method}-w{config.world_size}-s{config.seed}-{digest}"


def complete_digests(config: TrainConfig) -> None:
    """Fill in the digests of a user's own data, a schedule's files, and the checkpoint of ``start_from``.

    What is not there has none: it is missed before a worker starts.

    Raises:
        UserError: the configuration says already what they are, and they are not.
    """
    for key, path, content in _contents(config):
        config.digests[key] = _digest(f"{key}={path}", content, config.digests.get(key))
    dataset = config.dataset
    if own := _own_data(dataset):
        dataset.digest = _digest(f"dataset.root={dataset.root}", own, dataset.digest)


def _digest(what: str, content: bytes, given: str | None) -> str:
    found = hashlib.sha256(content).hexdigest()[:12]
    if given not in (None, found):
        raise UserError(
            f"{what} has other content than the run was made with ({found}, got {given}): name the same, or a new run"
        )
    return found


def _contents(config: TrainConfig) -> Iterator[tuple[str, str, bytes]]:
    """Yield each setting that names a file: its key, its path, and the content to be hashed."""
    for name in ("trace", "link", "select"):
        if (path := getattr(config.schedule, name)) is not None:
            with suppress(OSError):
                yield f"schedule.{name}", path, Path(path).read_bytes()
    if config.start_from is not None:
        run = Path(config.start_from)
        newest = max(run.glob("checkpoints/step-*/CHECKPOINT.json"), default=run / "CHECKPOINT.json")
        with suppress(OSError, ValueError, KeyError, TypeError):
            yield "start_from", config.start_from, json.dumps(json.loads(newest.read_bytes())["ranks"]).encode()


def _own_data(dataset: DatasetConfig) -> bytes | None:
    """Return the checksums of a user's own data as bytes; None for published data, or if it is missing."""
    if dataset.name not in OWN_DATA or dataset.root is None or not Path(dataset.root).is_dir():
        return None
    import data  # slow: it imports torch

    with suppress(ValueError):
        return json.dumps(data.sums(dataset.name, dataset.root, **dataset.settings), sort_keys=True).encode()
    return None
