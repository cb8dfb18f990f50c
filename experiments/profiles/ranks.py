"""The ranks that measure: started by the command, or the ones that torchrun or srun started it as."""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from experiments.benchmarks.processes import Row
from experiments.config.errors import UserError
from experiments.launching.launch import launch
from experiments.launching.rank_environment import RankEnvironment
from experiments.launching.rank_process import die_with_parent
from experiments.runs.atomic_files import write_json
from experiments.runs.json_lines import RecordWriter
from experiments.runs.manifest import collect_manifest
from experiments.runs.run_folder import RunFolder
from experiments.tracking.progress import watch

Settings = dict[str, Any]
Report = Callable[[], None]  # says that one of settings["num_parts"] is done
Work = Callable[[Settings, torch.device, Report], list[Row]]
DEVICES = ("auto", "cpu", "cuda")


def measure(module: str, settings: Settings) -> list[Row]:
    """Start ``settings["nproc"]`` ranks of ``module`` and return the rows that their rank 0 found.

    Args:
        settings: plain values for the work, and nproc, device, label and num_parts.

    Raises:
        RankFailure: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="micro-profile-") as name:
        folder = RunFolder(Path(name))
        write_json(folder.path / "settings.json", settings)
        with _shown(folder, settings):
            launch(folder.path, module=module, nproc_per_node=settings["nproc"], run_id=folder.path.name)
        rows: list[Row] = json.loads((folder.path / "rows.json").read_text())["rows"]
    return rows


def join(work: Work, settings: Settings, ranks: RankEnvironment) -> list[Row] | None:
    """Be one of the ranks that torchrun or srun started; only rank 0 returns rows."""
    ranks.export()
    die_with_parent()
    with tempfile.TemporaryDirectory(prefix="micro-profile-") as name:
        folder = RunFolder(Path(name))
        with _shown(folder, settings) if ranks.rank == 0 else nullcontext():
            rows = _on_this_rank(work, settings, folder)
    return rows if ranks.rank == 0 else None


def serve(name: str, work: Work) -> None:
    """Be one rank of ``measure``: join the others, do the work, let rank 0 write what it returns."""
    folder = RunFolder(Path(name))
    settings = json.loads((folder.path / "settings.json").read_text())
    rows = _on_this_rank(work, settings, folder)
    if int(os.environ["RANK"]) == 0:
        write_json(folder.path / "rows.json", {"rows": rows})


def check_device(device: str, nproc: int) -> None:
    """Raise UserError where ``device`` is no choice, or asks for GPUs that are not here."""
    if device not in DEVICES:
        raise UserError(f"--device must be one of {', '.join(DEVICES)}, got '{device}'")
    wanted = _num_here(nproc)
    if device == "cuda" and torch.cuda.device_count() < wanted:
        raise UserError(f"--device cuda needs {wanted} GPUs here, there are {torch.cuda.device_count()}")


def device_name(device: torch.device) -> str:
    """Return what was measured on, for people who read the file."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    facts = collect_manifest(seed=0, command=[], world_size=1, data_checksums={}, extra={})
    return f"{facts['cpu']['model']}, threads per rank: {torch.get_num_threads()}"


def _on_this_rank(work: Work, settings: Settings, folder: RunFolder) -> list[Row]:
    device = _own_device(settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rows = work(settings, device, _reporter(folder) if dist.get_rank() == 0 else _report_nothing)
    dist.destroy_process_group()
    return rows


def _own_device(settings: Settings) -> torch.device:
    """Return this rank's own GPU where its host has enough of them, else the CPU."""
    wanted = _num_here(settings["nproc"])
    if settings["device"] == "cpu" or torch.cuda.device_count() < wanted:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def _num_here(nproc: int) -> int:
    """Return the number of ranks on this host; srun does not tell, so there it is what the user says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(nproc)))


def _reporter(folder: RunFolder) -> Report:
    writer, done = RecordWriter(folder.steps_path), iter(range(10**9))
    return lambda: writer.append({"step": next(done)})


def _report_nothing() -> None:
    """Leave the telling to rank 0."""


def _shown(folder: RunFolder, settings: Settings) -> Any:
    return watch(folder.path, total_steps=settings["num_parts"], label=settings["label"], console=Console(stderr=True))
