"""Test and benchmark this code on a GPU, in one report to paste into an issue; at most 14 minutes on one GPU.

In order, each in separate processes with a time limit: Triton kernels compared with torch, timed, and compiled for
other GPUs; methods compared with the CPU; methods over NCCL compared with plain DDP and PyTorch's hooks, with waits,
launches and memory; FSDP2. Without a GPU, or with --device cpu, everything that needs no GPU runs on the CPU.

The exit status is 1 if a result is wrong or a part fails.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pandas as pd
import torch
from rich.console import Console

from experiments.config.command_line import comma_list
from experiments.config.errors import UserError
from experiments.tools.bench import tables
from experiments.tools.bench.gpu.parts import EACH, PARTS, Part
from experiments.tools.bench.gpu.training import Settings
from experiments.tools.ranks.group import GroupError, RankGroup
from experiments.tools.ranks.measures import Row
from experiments.tools.shared.methods import known_methods, select_names
from experiments.tools.shared.options import whole_number

NAME = "gpu"
EXAMPLE = 25_557_032  # the number of ResNet-50's parameters
METHODS = ("dense", "topk", "micro", "oktopk", "powersgd", "int8")
DEVICES = ("auto", "cpu", "cuda")
SOUND = "Nothing is wrong."
COMPILING = {"TRITON_INTERPRET": "0"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add, names = parser.add_argument, comma_list(str)
    add("--device", choices=DEVICES, default="auto", help="by default a GPU if there is one (%(default)s)")
    add("--numel", type=whole_number(), metavar="D", default=EXAMPLE, help="elements of vectors, parameters of models")
    add("--methods", type=names, default=METHODS, metavar="NAME,NAME", help="of conf/sparsifier (the main ones)")
    add("--parts", type=names, default=[], metavar="NAME,NAME", help=f"of {', '.join(PARTS)}; all by default")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure all parts, and write the report."""
    has_card = torch.cuda.device_count() > 0
    device = ("cuda" if has_card else "cpu") if arguments.device == "auto" else arguments.device
    if device == "cuda" and not has_card:
        raise UserError("--device cuda needs a GPU, and none was found")
    methods = select_names(arguments.methods, known_methods(), "--methods")
    settings = Settings(device=device, numel=arguments.numel, methods=tuple(methods))
    blocks, found = list[str](), list[Row]()
    try:
        for name in select_names(arguments.parts, list(PARTS), "--parts"):
            with console.status(PARTS[name].title):
                _measure(name, settings, blocks, found)
    finally:  # after an interruption, with the finished parts
        bad = [f"WRONG: {row['part']}, {row.get('name', '')}: {row['problem']}" for row in found if row.get("problem")]
        tables.write(pd.DataFrame(found), "GPUs", [_name(device), *(bad or [SOUND]), *blocks], arguments, console)
    if bad:
        sys.exit(1)


def _measure(name: str, settings: Settings, blocks: list[str], found: list[Row]) -> None:
    """Measure a part: add its heading and table or texts to ``blocks``, its rows to ``found``, even if interrupted."""
    part, started, rows, end = PARTS[name], time.monotonic(), list[Row](), "It was not finished."
    blocks.append(f"## {part.title}")
    if part.needs_card and settings.device == "cpu":
        blocks.append("no card")
        return
    try:
        for row in rows_of(part, settings):
            rows.append(row)
            found.append({"part": name, **row})
        end = f"Took {time.monotonic() - started:.0f} s."
    finally:
        blocks += [_shown(part, rows), end]


def _shown(part: Part, rows: list[Row]) -> str:
    """Return a part's table."""
    return tables.table(pd.DataFrame(rows), part.columns) if rows else ""


def rows_of(part: Part, settings: Settings) -> Iterator[Row]:
    """Yield the rows of a part; a failed call gives a row with the error, and the others continue on new ranks."""
    ends_at = time.monotonic() + part.limit_s
    num_ranks, backend = _ranks_of(part, settings)
    names = [each for name in part.names for each in (settings.methods if name in EACH else (name,))]
    most_s = part.limit_s / min(len(names), 3)
    with ExitStack() as open_ranks:
        ranks = None
        for name in names:
            limit_s = min(ends_at - time.monotonic(), most_s)
            if limit_s <= 0:
                yield {"name": name, "problem": "no time was left"}
                continue
            try:
                ranks = ranks or open_ranks.enter_context(RankGroup(num_ranks, backend=backend, env=COMPILING))
                yield from ranks.call(part.work, settings, name, timeout_s=limit_s)[0]
            except GroupError as error:
                ranks = None
                yield {"name": name, "problem": str(error)}


def _ranks_of(part: Part, settings: Settings) -> tuple[int, str]:
    num_gpus = torch.cuda.device_count() if settings.device == "cuda" else 0
    if num_gpus and part.ranks == "each":
        return num_gpus, "nccl"
    if part.ranks == "one":
        return 1, "gloo"
    return 2, "nccl" if part.ranks == "two" and num_gpus > 1 else "gloo"


def _name(device: str) -> str:
    if device == "cpu":
        return "No GPU: everything ran on the CPU."
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} visible."
