"""Codes in FSDP2's reduce-scatter, compared with FSDP's own: bytes of a rank, time of a step, loss of a small GPT.

torchrun --nproc-per-node 2 -m experiments.tools.within_reduce_scatter FILE   # of ASCII text
RANKS=2 docs/gallery/two_hosts.sh 20mbit -m experiments.tools.within_reduce_scatter FILE 20   # 4 ranks, a slow link

A GPT of 2 layers of 64, 200 steps (or as many as given) of AdamW at a rate of 0.003, windows of 32 bytes, 16 a rank.
Bits per byte are of the last tenth of the text, which is not trained on. *Sent*: kB of a rank in the reduce-scatter of
a step, counted for codes, at best for FSDP's own. *Step*: the median time of a step; FSDP gathers the weights in
float32 in all forms.
"""

import math
import sys
import time
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

from experiments.tools.shared.markdown import table
from micro.fsdp import attach_within
from models.gpt import gpt

LENGTH, BATCH, RATE, SEEDS = 32, 16, 3e-3, 3
FORMS: dict[str, tuple[int, str]] = {  # bytes per value in FSDP's reduce-scatter, and the codec that replaces it
    "FSDP, float32": (4, ""),
    "FSDP, bfloat16": (2, ""),
    **{f"attach_within, {codec}": (4, codec) for codec in ("bfloat16", "int8", "fp8")},
}


def trained(text: Tensor, steps: int, seed: int, width: int, codec: str) -> tuple[float, float, float]:
    """Train once; return the bits per byte of held-out text, and the kB that a rank sends and the ms of a step."""
    torch.manual_seed(seed)
    rank, size, end = dist.get_rank(), dist.get_world_size(), len(text) * 9 // 10
    model: Any = gpt(num_words=128, hidden=64, num_layers=2, num_heads=4, max_length=LENGTH, positions="rope")
    sent = sum(parameter.numel() for parameter in model.parameters()) * width * (size - 1) / size
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if width == 2 else MixedPrecisionPolicy()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)), mp_policy=policy)
    scatter = attach_within(model, codec) if codec else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    ends = [time.perf_counter()]
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, text, torch.randint(end - LENGTH, (BATCH,), generator=draw)).backward()
        optimizer.step()
        ends.append(time.perf_counter())
    with torch.no_grad():
        bits = float(loss_of(model, text, torch.arange(end, len(text) - LENGTH, 4 * LENGTH))) / math.log(2)
    step_s = median(after - before for before, after in pairwise(ends))
    return bits, (scatter.bytes_sent / steps if scatter else sent) / 1000, 1000 * step_s


def loss_of(model: Any, text: Tensor, starts: Tensor) -> Tensor:
    """Return the mean loss of windows of the text that begin at ``starts`` (n,)."""
    windows = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return cross_entropy(model(windows[:, :-1])[0].flatten(0, 1), windows[:, 1:].flatten())


def main(path: str, steps: int = 200) -> None:
    """Print a table on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text, found = torch.tensor(list(Path(path).read_bytes())), dict[str, list[tuple[float, float, float]]]()
    for seed, name in product(range(SEEDS), FORMS):
        found.setdefault(name, []).append(trained(text, steps, seed, *FORMS[name]))
        if dist.get_rank() == 0:
            print(seed, name, *found[name][-1], file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        rows = []
        for name, each in found.items():
            ends, sent, step_ms = zip(*each, strict=True)
            last = f"{sent[0]:.1f}", f"{median(step_ms):.1f}"
            rows.append([name, *(f"{end:.4f}" for end in (*ends, sum(ends) / SEEDS)), *last])
        seeds = (f"seed {seed}" for seed in range(SEEDS))
        print(table(["reduce-scatter", *seeds, "mean", "sent, kB", "step, ms"], rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
