"""A measurement on several processes: settings in, rows out, through files in a temporary folder."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.launching.launch import launch
from experiments.runs.atomic_files import write_json
from micro.comm import GroupComm

Row = dict[str, Any]


def measure(module: str, settings: dict[str, Any], nproc: int) -> list[Row]:
    """Run ``module`` on ``nproc`` ranks and return the rows that its rank 0 found.

    Raises:
        RankFailure: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="micro-bench-") as name:
        folder = Path(name)
        write_json(folder / "settings.json", settings)
        launch(folder, module=module, nproc_per_node=nproc, run_id=folder.name)
        rows: list[Row] = json.loads((folder / "rows.json").read_text())["rows"]
        return rows


def serve(folder: str, work: Callable[[dict[str, Any], torch.device], list[Row]]) -> None:
    """Be one rank of ``measure``: join the others, do the work, let rank 0 write what it returns."""
    settings = json.loads((Path(folder) / "settings.json").read_text())
    on_gpu = torch.cuda.device_count() >= settings["nproc"]
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    rows = work(settings, device)
    if dist.get_rank() == 0:
        write_json(Path(folder) / "rows.json", {"rows": rows})
    dist.destroy_process_group()


def slowest(value: float, device: torch.device) -> float:
    """Return the largest of all ranks' values: a step lasts as long as its slowest rank."""
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    return float(GroupComm(timed=False).gather_rows(mine).max())
