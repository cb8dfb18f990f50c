"""What a user would write without this harness, for torchrun: the training of ``train model=mlp epochs=1``, dense.

``python -m torch.distributed.run --nproc-per-node 2 -m experiments.benchmarks.bare_training WEIGHTS`` trains the MLP on
the digits for one epoch with DDP, evaluates it, and writes its weights.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import data
import models

BATCH_SIZE = 16


def main(weights: str) -> None:
    """Train on the rank that the environment variables name."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = data.load("digits", root=None, seed=0)
    assert isinstance(digits, data.Classification)
    model = models.build("mlp", sizes={"in_channels": 1, "num_classes": 10, "image_size": 8})
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    order = torch.randperm(len(digits.train_inputs), generator=torch.Generator().manual_seed(0))
    for picked in order.split(BATCH_SIZE * world_size)[:-1]:
        own = picked[rank::world_size]
        optimizer.zero_grad()
        cross_entropy(ddp(digits.train_inputs[own]), digits.train_targets[own]).backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(digits.test_inputs).argmax(1) == digits.test_targets).float().mean()
    if rank == 0:
        torch.save(model.state_dict(), weights)
        print(f"accuracy {float(right):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
