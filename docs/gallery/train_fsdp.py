"""Train a GPT with FSDP2, sharded within nodes, with a sparse exchange between them, in a loop like torchtitan's.

torchrun --nproc-per-node 4 train_fsdp.py 20 2   # twenty steps, on two nodes of two ranks
torchrun --nproc-per-node 4 train_fsdp.py 40 2   # resumes, up to the fortieth
"""

import os
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, Text, batches_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import micro

WARM_UP, SAVE_EVERY = 10, 10  # steps


class Training:
    """Model and optimizer, as torch.distributed.checkpoint takes them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return dict(zip(("model", "optimizer"), get_state_dict(self._model, self._optimizer), strict=True))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what was saved."""
        model, optimizer = saved["model"], saved["optimizer"]
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)


def main(steps: int, folder: Path, ranks_per_node: int) -> nn.Module:
    """Train up to ``steps`` in all; checkpoints are in ``folder``, one for all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shape = (world_size // ranks_per_node, ranks_per_node)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("node", "local"))

    model = GPT().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["local"])  # within a node; over the whole mesh FSDP would average densely
    fully_shard(model, mesh=mesh["local"])
    reducer = micro.SparseReducer(micro.Micro(), density=0.05)
    attachment = micro.attach_fsdp(model, reducer, replicas=mesh["node"], clip=1.0)  # in place of clip_grad_norm_
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))

    done = torch.tensor(0)  # steps, and so batches of the data
    state = {"training": Training(model, optimizer), "scheduler": scheduler, "done": done}
    state["micro"] = micro.RankStates(attachment)
    whole = sorted(folder.glob("step*/.metadata"))  # a file that is written last
    if whole:
        dcp.load(state, checkpoint_id=whole[-1].parent)

    batches = DataLoader(Text(), batch_sampler=islice(cycle(batches_of(rank, world_size)), int(done), None))
    for step, batch in zip(range(int(done) + 1, steps + 1), batches, strict=False):
        loss = model(**{name: tokens.to(device) for name, tokens in batch.items()})["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % SAVE_EVERY == 0 or step == steps:
            done.fill_(step)
            dcp.save(state, checkpoint_id=folder / f"step{step:06d}")
            if rank == 0:
                print(f"step {step}: loss {loss:.4f}, density {attachment.summary.density:.3f}")
    return model


if __name__ == "__main__":
    per_node = int(sys.argv[2] if len(sys.argv) > 2 else os.environ["LOCAL_WORLD_SIZE"])
    main(int(sys.argv[1]), Path("checkpoints"), per_node)
    dist.destroy_process_group()
