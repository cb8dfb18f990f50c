"""Measure on several ranks: those that the command starts, or those that torchrun or srun started it as."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from experiments.config.errors import UserError
from experiments.launching.process_lifetime import die_with_parent, exit_at_termination
from experiments.launching.rank_environment import RankEnvironment, is_rank
from experiments.ranks.group import RankGroup
from experiments.ranks.measures import Row, Settings, own_device
from experiments.runs.json_lines import RecordWriter
from experiments.runs.manifest import collect_manifest
from experiments.runs.run_folder import RunFolder
from experiments.tracking.progress import watch
from experiments.training.devices import device_of_rank

Report = Callable[[], None]  # says that one of settings["num_parts"] is done
Work = Callable[[Settings, torch.device, Report], list[Row]]
DEVICES = ("auto", "cpu", "cuda")


def measure(work: Work, settings: Settings) -> list[Row]:
    """Start ``settings["nproc"]`` ranks, let them work and return the rows of their rank 0.

    Args:
        work: a function of a module.
        settings: plain values for the work, and nproc, device, label and num_parts.

    Raises:
        RankFailure: a rank failed.
    """
    with (
        exit_at_termination(),
        tempfile.TemporaryDirectory(prefix="micro-profile-") as folder,
        _shown(Path(folder), settings),
        RankGroup(settings["nproc"], backend=_backend(settings)) as ranks,
    ):
        rows: list[Row] = ranks.call(_work_on_this_rank, work, settings, Path(folder))[0]
    return rows


def join(work: Work, settings: Settings, ranks: RankEnvironment) -> list[Row] | None:
    """Be one of the ranks that torchrun or srun started; only rank 0 returns rows."""
    ranks.export()
    die_with_parent()
    store, rank, world_size = next(dist.rendezvous("env://"))
    device = device_of_rank(settings["device"], store, option="--device cuda")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size)
    with (
        tempfile.TemporaryDirectory(prefix="micro-profile-") as folder,
        _shown(Path(folder), settings) if ranks.rank == 0 else nullcontext(),
    ):
        rows = _work_on_this_rank(work, settings, Path(folder))
    dist.destroy_process_group()
    return rows if ranks.rank == 0 else None


def check_device(device: str, nproc: int) -> None:
    """Raise UserError where ``device`` is no choice, or asks for GPUs that are not here."""
    if device not in DEVICES:
        raise UserError(f"--device must be one of {', '.join(DEVICES)}, got '{device}'")
    if device == "cuda" and torch.cuda.device_count() < nproc and not is_rank():  # ranks compare what each of them sees
        raise UserError(f"--device cuda needs {nproc} GPUs here, there are {torch.cuda.device_count()}")


def device_name(device: torch.device) -> str:
    """Return what was measured on, for people who read the file."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    facts = collect_manifest(seed=0, command=[], world_size=1, data_checksums={}, extra={})
    return f"{facts['cpu']['model']}, threads per rank: {torch.get_num_threads()}"


def _work_on_this_rank(work: Work, settings: Settings, folder: Path) -> list[Row]:
    return work(settings, own_device(), _reporter(folder) if dist.get_rank() == 0 else _report_nothing)


def _backend(settings: Settings) -> str:
    """Return nccl where this host has a GPU for each of its ranks, unless the CPU was chosen; else gloo."""
    on_gpus = settings["device"] != "cpu" and torch.cuda.device_count() >= settings["nproc"]
    return "nccl" if on_gpus else "gloo"


def _reporter(folder: Path) -> Report:
    writer, done = RecordWriter(RunFolder(folder).steps_path), iter(range(10**9))
    return lambda: writer.append({"step": next(done)})


def _report_nothing() -> None:
    """Leave the reports to rank 0."""


def _shown(folder: Path, settings: Settings) -> Any:
    """Show the progress that rank 0 reports in a folder."""
    return watch(folder, total_steps=settings["num_parts"], label=settings["label"], console=Console(stderr=True))
