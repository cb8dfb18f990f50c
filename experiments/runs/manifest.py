"""The manifest of a run: everything besides the configuration that may affect its results, such as the code."""

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from experiments.config import ROOT
from experiments.runs.files import load_json
from experiments.runs.run_folder import RunFolder

CODE = ("conf", "data", "experiments", "micro", "models")  # folders whose files change what a run computes
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
    import torch  # slow, and all else here is read without it

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


def git_state(folder: Path) -> dict[str, Any]:
    """Return the revision, whether the code differs from it, and the SHA-256 of that difference.

    Tracked files count, and files of `CODE` that git does not know and does not ignore. All three are None if
    ``folder`` is in no repository, there is no commit, or git is missing. The checksum is also None if nothing differs.
    """
    try:
        revision = _git(folder, "rev-parse", "HEAD").decode().strip()
        difference = _git(folder, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color") + _untracked(folder)
    except (OSError, subprocess.SubprocessError):
        return {"revision": None, "dirty": None, "diff_sha256": None}
    checksum = hashlib.sha256(difference).hexdigest() if difference else None
    return {"revision": revision, "dirty": bool(difference), "diff_sha256": checksum}


def other_code(finished: Sequence[RunFolder]) -> str:
    """Return a line if some finished runs were made by other code than the present one, else an empty one."""
    here = code_name(git_state(ROOT)) if finished else ""
    names = [code_name(load_json(folder.manifest_path).get("git")) for folder in finished]
    others = Counter(name for name in names if name and name != here)
    if not others or not here:
        return ""
    made = ", ".join(f"{name} ({number})" for name, number in others.most_common())
    return f"{others.total()} of {len(finished)} finished runs are of other code: {made}; the code here is {here}"


def code_name(git: Any) -> str:
    """Return how a state of the code is called; empty where it is not known."""
    if not isinstance(git, Mapping) or not git.get("revision"):
        return ""
    changes = str(git.get("diff_sha256") or "")
    return str(git["revision"])[:8] + (f" with changes {changes[:6]}" if changes else "")


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


def _untracked(folder: Path) -> bytes:
    """Return a line for each file of `CODE` that git does not know: its name, and the SHA-256 of its content."""
    names = _git(folder, "ls-files", "--others", "--exclude-standard", "-z", "--", *CODE).split(b"\0")
    lines = []
    for name in filter(None, names):
        with suppress(OSError):  # gone since, or a link to nothing
            content = (folder / os.fsdecode(name)).read_bytes()
            lines.append(name + b" " + hashlib.sha256(content).hexdigest().encode() + b"\n")
    return b"".join(lines)


def _git(folder: Path, *arguments: str) -> bytes:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # several runs may call git at once
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, env=environment, timeout=30, check=True).stdout


@cache
def _packages() -> dict[str, str]:
    """Return the version of every installed package."""
    found = {each.metadata["Name"]: each.version for each in distributions() if each.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))
