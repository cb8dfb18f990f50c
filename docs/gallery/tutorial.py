"""The toy model of PyTorch's tutorials on DistributedDataParallel, with checkpoints by torch.distributed.checkpoint.

torchrun --nproc-per-node 2 tutorial.py 10   # ten steps
torchrun --nproc-per-node 2 tutorial.py 20   # resumes, up to the twentieth
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import micro


class ToyModel(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(10, 64), nn.Linear(64, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        return self.second(self.first(inputs).relu())


def main(steps: int, folder: Path) -> DistributedDataParallel:
    """Train up to ``steps`` in all; checkpoints are in ``folder``, one for all ranks."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(ToyModel())
    attachment = micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.05))
    loss_of, optimizer = nn.MSELoss(), SGD(model.parameters(), lr=0.05)

    state = {"model": model.module.state_dict(), "step": torch.tensor(0), "micro": micro.RankStates(attachment)}
    whole = sorted(folder.glob("step*/.metadata"))  # a file that is written last
    if whole:
        dcp.load(state, checkpoint_id=whole[-1].parent)
    first = int(state["step"])

    for step in range(first, steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        inputs, labels = torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if steps > first:
        state["step"].fill_(steps)
        dcp.save(state, checkpoint_id=folder / f"step{steps:05d}")
        if dist.get_rank() == 0:
            print(f"step {steps}: loss {loss:.4f}, {attachment.stats[0].bytes_sent:.0f} bytes sent")
    return model


if __name__ == "__main__":
    main(int(sys.argv[1]), Path("checkpoints"))
    dist.destroy_process_group()
