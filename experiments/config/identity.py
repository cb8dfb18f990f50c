"""The identity of a run: its settings of version 1 of the schema, and what differs from the defaults of newer ones.

So a run keeps its name, and the folder with it, when the schema gets a key.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from experiments.config.method_names import method_of
from experiments.config.schema import TrainConfig
from experiments.config.values import MISSING, Flat, defaults_of_schema, flat

NEUTRAL = frozenset(  # settings of where and how a run is carried out; they do not change its result
    {
        *("output", "dataset.root", "cluster.nproc_per_node", "cluster.nnodes", "cluster.rdzv_endpoint"),
        *("cluster.max_restarts", "cluster.slurm", "cluster.num_threads", "cluster.timeout_s"),
        *("checkpoint", "save_weights", "tracking", "peak_tflops", "resume"),
        *("measure_residual_every", "measure_test_every"),
        "scale",  # the values that it chooses are in the hash themselves
    }
)

_DIGESTS = "digests."
SIMULATED = "simulated"  # the cluster's name

VERSION_1 = {  # the schema's settings when names of runs were fixed, by group; their values are always in the hash
    "model": "name num_classes settings",
    "dataset": "name augment sequence_length negatives settings",
    "sparsifier": "name reducer selector exchange codec indices feedback policy",
    "schedule": "name settings trace link select",
    "cluster": "name world_size device",
    "optimizer": "name momentum nesterov betas momentum_at lr_at weight_decay decay_of clip clip_at",
    "density_warmup": "steps start stages",
    "": "scope density seed epochs batch_size lr lr_shape lr_warmup_epochs lr_warmup_start lr_milestones lr_decay "
    "accumulate precision channels_last compile nonfinite timed start_from resize",
}

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
"""Newer settings, with the values that runs before them had: with these they are not in the hash.

A test compares them with the schema: a new setting is added here with what a run without it did.
"""


def is_neutral(key: str) -> bool:
    """Return whether a dotted key is a neutral setting, or part of one."""
    return _is_in(key, NEUTRAL)


def is_of_version_1(key: str) -> bool:
    """Return whether a dotted key is a setting of version 1, or part of one."""
    return _is_in(key, _VERSION_1_KEYS)


def identity(settings: Mapping[str, Any], kind: type = TrainConfig) -> Flat:
    """Return what tells a run from others, of its settings by dotted keys: no neutral ones, no newer defaults."""
    newer = newer_defaults(kind)
    found = {
        key: value
        for key, value in settings.items()
        if not is_neutral(key) and (is_of_version_1(key) or newer.get(key, MISSING) != value)
    }
    if found.get("cluster.name", SIMULATED) != SIMULATED:
        found["cluster.name"] = "local"  # real workers compute the same wherever they are
    for key in [key for key in found if key.startswith(_DIGESTS)]:
        found[key.removeprefix(_DIGESTS)] = found.pop(key)  # in place of the path
    return found


def newer_defaults(kind: type = TrainConfig) -> Flat:
    """Return the values with which settings that version 1 has not are left out of names, by dotted keys."""
    known = flat(defaults_of_schema(kind))
    return {key: value for key, value in known.items() if not (is_neutral(key) or is_of_version_1(key))} | dict(ADDED)


def run_name(config: TrainConfig) -> str:
    """Return the run's folder name: readable, and ending in a hash of its identity."""
    settings = identity(flat(dataclasses.asdict(config)), type(config))
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    method = f"{method_of(config)}-d{config.density:g}"
    return f"{config.model.name}-{config.dataset.name}-{method}-w{config.world_size}-s{config.seed}-{digest}"


def _is_in(key: str, known: frozenset[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:length]) in known for length in range(1, len(parts) + 1))


_VERSION_1_KEYS = frozenset(f"{group}.{key}".lstrip(".") for group, keys in VERSION_1.items() for key in keys.split())
