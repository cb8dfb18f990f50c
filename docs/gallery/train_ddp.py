"""Train a GPT with plain DistributedDataParallel, save, and resume from the checkpoint.

torchrun --nproc-per-node 2 train_ddp.py 1   # one epoch
torchrun --nproc-per-node 2 train_ddp.py 3   # resumes, up to the third
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Text, batches_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import micro


def main(epochs: int, folder: Path) -> DistributedDataParallel:
    """Train up to ``epochs`` in all; checkpoints are in ``folder``."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(GPT())
    attachment = micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Text(), batch_sampler=batches_of(rank, world_size))

    def file(epoch: int, rank: int) -> Path:  # one per rank, because each rank has its own residuals
        return folder / f"epoch{epoch}_rank{rank}.pt"

    whole = [epoch for epoch in range(1, epochs + 1) if all(file(epoch, each).exists() for each in range(world_size))]
    first = whole[-1] if whole else 0  # a kill may leave the files of some ranks only
    if first > 0:
        saved = torch.load(file(first, rank))
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        attachment.load_state_dict(saved["micro"])

    for epoch in range(first, epochs):
        for batch in loader:
            loss = model(**batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "micro": attachment.state_dict()}, folder / f"rank{rank}.part")
        (folder / f"rank{rank}.part").rename(file(epoch + 1, rank))  # a file of that name is complete
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, density {attachment.stats[0].global_density:.3f}")
    return model


if __name__ == "__main__":
    main(int(sys.argv[1]), Path("checkpoints"))
    dist.destroy_process_group()
