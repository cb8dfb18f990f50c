"""Teach a small network the outputs of another: torchrun --nproc-per-node 2 plain_ddp.py."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    teacher = nn.Linear(64, 1).to(device)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    model = DistributedDataParallel(network)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)  # every rank draws its own samples
    for step in range(101):
        inputs = torch.randn(32, 64, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
