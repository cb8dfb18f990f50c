"""Train a GPT in one process and serve it in bfloat16 in another, which gets a patch of its weights after each step.

torchrun --nproc-per-node 2 train_and_serve.py 30   # steps
"""

import sys
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Text
from torch import Tensor, nn
from torch.utils.data import DataLoader

import micro.patches


def in_bfloat16(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that are served."""
    return {name: weight.bfloat16() for name, weight in model.state_dict().items()}


def train(steps: int, folder: Path) -> nn.Module:
    """Train, and send what each step has changed; ``folder`` gets the patches too."""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    published = in_bfloat16(model)
    folder.mkdir(parents=True, exist_ok=True)
    for step, batch in enumerate(islice(cycle(DataLoader(Text(), batch_size=8)), steps)):
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        patch = micro.patches.diff(published, in_bfloat16(model))  # the trainer
        micro.patches.save(patch, folder / f"step{step:06d}.patch")
        micro.patches.broadcast_(published, patch)
    return model


def serve(steps: int) -> nn.Module:
    """Answer between one patch and the next."""
    model = GPT().bfloat16()
    request = Text()[0]
    for step in range(steps):
        patch = micro.patches.broadcast_(model.state_dict())  # the server
        with torch.no_grad():
            loss = float(model(**{name: tokens[None] for name, tokens in request.items()})["loss"])
        if step % 10 == 9:
            share = patch.num_changed / patch.numel
            print(f"step {step}: loss {loss:.4f}, {share:.1%} changed, {patch.num_bytes} of {2 * patch.numel} bytes")
    return model


def main(steps: int, folder: Path) -> nn.Module:
    """Train on rank 0 and serve on rank 1."""
    dist.init_process_group("gloo")
    return train(steps, folder) if dist.get_rank() == 0 else serve(steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path("patches"))
    dist.destroy_process_group()
