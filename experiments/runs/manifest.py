"""The manifest of a run: everything besides the configuration that may affect its results."""

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from experiments.config.paths import ROOT
from experiments.runs.files import load_json
from experiments.runs.git_state import git_state
from experiments.runs.run_folder import RunFolder

RUNS_AT_ONCE = "MICRO_RUNS_AT_ONCE"  # which a sweep that carries out several runs at once sets for each
_PACKAGES = ("torch", "numpy", "torchvision", "hydra-core", "micro-sparse", "numba")
_VARIABLES = re.compile(
    "(TORCH_)?NCCL_|GLOO_|OMP_|NUMBA_|TRITON_|(CUBLAS_WORKSPACE_CONFIG|CUDA_LAUNCH_BLOCKING|CUDA_VISIBLE_DEVICES|"
    "MKL_NUM_THREADS|PYTHONHASHSEED|SLURM_JOB_ID|SLURM_JOB_NODELIST|SLURM_JOB_PARTITION|SLURM_NNODES|SLURM_NTASKS)$"
)
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)  # in the name of a variable
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def collect_manifest(
    *, seed: int, command: list[str], world_size: int, data_checksums: Mapping[str, str], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of a run that starts now, with further entries, as plain values; the unknown is None."""
    packages = _packages()
    variables = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)}
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [_USER_OF_URL.sub("***", word) for word in command],  # a name and a password may stand there
        "seed": seed,
        "world_size": world_size,
        "git": git_state(ROOT),
        "versions": {"python": platform.python_version(), **{name: packages.get(name) for name in _PACKAGES}},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": {"model": cpu_model(), "num_cores": os.cpu_count()},
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "environment": {name: value for name, value in variables.items() if not _SECRET.search(name)},
        "num_threads": torch.get_num_threads(),
        "runs_at_once": int(os.environ.get(RUNS_AT_ONCE, "1")),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "packages": packages,
        "deterministic": {
            "algorithms": torch.are_deterministic_algorithms_enabled(),
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        "data_checksums": dict(data_checksums),
        **extra,
    }


def code_of_attempts(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the code of the earlier attempts at a run that goes on from their checkpoints, as ``git_state`` has it.

    Attempts before the last that began again do not count.
    """
    code: list[dict[str, Any]] = []
    for manifest in manifests_of(folder)[:-1]:
        if manifest.get("began_at_step") == 0:
            code = []
        if manifest.get("git"):
            code.append(manifest["git"])
    return code


def other_data(folder: RunFolder, now: Mapping[str, str]) -> str:
    """Return which of the data's files are not those that a run was trained on; empty where all are, or not known.

    Args:
        now: the SHA-256 of each file of the data that it would go on with.
    """
    last: dict[str, Any] = next((manifest for manifest in reversed(manifests_of(folder)) if manifest), {})
    then = last.get("data_checksums")
    return ", ".join(name for name, checksum in now.items() if then and checksum not in then.values())


def manifests_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the manifests of earlier attempts at a run, in order, and its own last; empty where there is none."""
    attempts = (path for path in folder.attempts_path.glob("*") if path.name.isdecimal())
    paths = [*sorted(attempts, key=lambda path: int(path.name)), folder.path]
    return [load_json(path / "manifest.json") for path in paths]


def cpu_model() -> str | None:
    """Return the name of the processor, where the system tells it."""
    if sys.platform != "linux":
        return platform.processor() or None
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


@cache
def _packages() -> dict[str, str]:
    """Return the version of every installed package."""
    found = {each.metadata["Name"]: each.version for each in distributions() if each.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))
