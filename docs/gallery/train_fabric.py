"""Train a GPT with Lightning Fabric, save, and resume from the checkpoint.

torchrun --nproc-per-node 2 train_fabric.py 1   # one epoch
torchrun --nproc-per-node 2 train_fabric.py 3   # resumes, up to the third
"""

import sys
from pathlib import Path

import torch
from gpt import GPT, Text, batches_of
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

import micro


def main(epochs: int, folder: Path) -> nn.Module:
    """Train up to ``epochs`` in all; the checkpoint is in ``folder``."""
    fabric, network = Fabric(accelerator="cpu", devices=2, strategy="ddp"), GPT()
    fabric.launch()
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=1e-3))
    attachment = micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.05))
    loader = DataLoader(Text(), batch_sampler=batches_of(fabric.global_rank, fabric.world_size))

    state = {"model": model, "optimizer": optimizer, "micro": micro.AllRanks(attachment), "epoch": 0}
    path = folder / "last.ckpt"
    if path.exists():
        fabric.load(path, state)

    while state["epoch"] < epochs:
        for batch in loader:
            loss = model(**batch)["loss"]
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        fabric.print(f"epoch {state['epoch']}: loss {loss:.4f}")
        state["epoch"] += 1
        fabric.save(path, state)
    return model


if __name__ == "__main__":
    main(int(sys.argv[1]), Path("checkpoints"))
