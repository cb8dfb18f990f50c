"""Train a GPT with Accelerate, save, and resume from the checkpoint.

torchrun --nproc-per-node 2 train_accelerate.py 1   # one epoch
torchrun --nproc-per-node 2 train_accelerate.py 3   # resumes, up to the third
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from gpt import GPT, Text
from torch import nn
from torch.utils.data import DataLoader

import micro


class Progress:
    """The number of epochs done, in a form that Accelerate saves."""

    epochs = 0

    def state_dict(self) -> dict[str, int]:
        """Return what is saved."""
        return {"epochs": self.epochs}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        """Load what was saved."""
        self.epochs = saved["epochs"]


def main(epochs: int, folder: Path) -> nn.Module:
    """Train up to ``epochs`` in all; checkpoints are in ``folder``."""
    accelerator, network, progress = Accelerator(cpu=True), GPT(), Progress()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(Text(), batch_size=8))
    attachment = micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.05))
    accelerator.register_for_checkpointing(micro.AllRanks(attachment), progress)
    saved = sorted(folder.glob("epoch*"))
    if saved:
        accelerator.load_state(saved[-1])

    while progress.epochs < epochs:
        for batch in loader:
            loss = model(**batch)["loss"]
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {progress.epochs}: loss {loss:.4f}")
        progress.epochs += 1
        accelerator.save_state(folder / "unfinished")  # renamed when all ranks have written: it is complete then
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (folder / "unfinished").rename(folder / f"epoch{progress.epochs:03d}")
        accelerator.wait_for_everyone()
    return model


if __name__ == "__main__":
    main(int(sys.argv[1]), Path("checkpoints"))
