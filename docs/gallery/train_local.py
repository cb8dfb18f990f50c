"""Train a GPT with Accelerate by local steps: each process trains alone for five steps, then all exchange.

torchrun --nproc-per-node 2 train_local.py 1   # one epoch
torchrun --nproc-per-node 2 train_local.py 3   # resumes, up to the third
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from gpt import GPT, Text
from torch import nn
from torch.utils.data import DataLoader

import micro


def main(epochs: int, folder: Path) -> nn.Module:
    """Train up to ``epochs`` in all; checkpoints are in ``folder``."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(GPT(), evaluation_mode=True)  # on its device, without DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(Text(), batch_size=8))
    local = micro.LocalSteps(model, optimizer, micro.SparseReducer(micro.Micro(), density=0.05), every=5)

    own = f"rank{accelerator.process_index}.pt"  # weights and moments within a round are each process's own
    saved = sorted(folder.glob("epoch*"))
    if saved:
        accelerator.load_state(saved[-1])
        state = torch.load(saved[-1] / own)
        optimizer.load_state_dict(state["optimizer"])
        local.load_state_dict(state["micro"])

    for epoch in range(len(saved), epochs):
        for batch in loader:
            loss = model(**batch)["loss"]
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss:.4f}, {local.num_rounds} exchanges")
        unfinished = folder / "unfinished"
        with local.global_weights():  # the file of the model gets those of the last exchange
            accelerator.save_state(unfinished)
        torch.save({"optimizer": optimizer.state_dict(), "micro": local.state_dict()}, unfinished / own)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            unfinished.rename(folder / f"epoch{epoch + 1:03d}")  # complete now
        accelerator.wait_for_everyone()
    local.finish()  # ends the last round: all ranks then have the same weights
    return model


if __name__ == "__main__":
    main(int(sys.argv[1]), Path("checkpoints"))
