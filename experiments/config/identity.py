"""The identity of a run: the settings that change what it computes. A run's name ends in their hash.

A run keeps its name, and the folder with it, when the schema gets a key: see ``ADDED``.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from experiments.config.method_names import method_of
from experiments.config.schema import SIMULATED, Flat, TrainConfig, flat

NEUTRAL = frozenset(  # settings of where and how a run is carried out; they do not change its result
    {
        *("output", "dataset.root", "cluster.nproc_per_node", "cluster.nnodes", "cluster.rdzv_endpoint"),
        *("cluster.max_restarts", "cluster.slurm", "cluster.num_threads", "cluster.timeout_s"),
        *("checkpoint", "save_weights", "tracking", "peak_tflops", "resume"),
        *("measure_residual_every", "measure_test_every"),
        "scale",  # the values that it chooses are in the hash themselves
    }
)

ADDED: Mapping[str, Any] = {
    "dataset.digest": None,
    "digests": {},
    "optimizer.clip_norm": "rank",
    "lr_end": 0.0,
    "rounds.every": 0,
    "rounds.lr": 1.0,
    "rounds.momentum": 0.0,
    "rounds.nesterov": False,
    "rounds.buffers": "mean",
    "rounds.momentum_with_feedback": False,
    "rounds.fragments": 1,
    "rounds.delay": 0,
    "rounds.mix": 1.0,
    "rounds.lost_workers": "stop",
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
    """Return what tells a run from others, of its settings by dotted keys: no neutral ones, no values of ``ADDED``."""
    found = {
        key: value
        for key, value in settings.items()
        if not is_neutral(key) and not (key in ADDED and ADDED[key] == value)
    }
    if found.get("cluster.name", SIMULATED) != SIMULATED:
        found["cluster.name"] = "local"  # real workers compute the same wherever they are
    for key in [key for key in found if key.startswith(_DIGESTS)]:
        found[key.removeprefix(_DIGESTS)] = found.pop(key)  # in place of the path
    return found


def run_name(config: TrainConfig) -> str:
    """Return the run's folder name: readable, and ending in a hash of its identity."""
    settings = identity(flat(dataclasses.asdict(config)))
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    method = f"{method_of(config)}-d{config.density:g}"
    return f"{config.model.name}-{config.dataset.name}-{method}-w{config.world_size}-s{config.seed}-{digest}"
