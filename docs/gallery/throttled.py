"""Train on digits for some seconds with plain DDP or a method of micro, and draw the accuracies over time.

./two_hosts.sh 20mbit throttled.py ddp 90      # writes ddp.csv; also: fp16, powersgd, micro
python throttled.py plot                       # draws throttled.png from all of them
"""

import csv
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import micro

BATCH, NUM_TEST = 32, 297  # images of a step on each rank; images of the test set, of 1,797


def network() -> nn.Module:
    """Return three layers with 4.3 million parameters: 17 MB of gradients in each step."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def compress(model: DistributedDataParallel, method: str) -> None:
    """Choose how gradients are exchanged; ``ddp`` leaves them to DDP."""
    if method == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if method == "powersgd":
        micro.attach(model, micro.PowerSGD(rank=4))
    if method == "micro":
        micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.01))


def accuracy(model: DistributedDataParallel, images: Tensor, labels: Tensor) -> float:
    """Return the share of images whose label the model finds."""
    with torch.no_grad():
        return float((model.module(images).argmax(1) == labels).float().mean())


def train(method: str, seconds: float) -> None:
    """Train on this rank until so many seconds have passed; rank 0 writes METHOD.csv: seconds, accuracy."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pixels, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(targets)[order]
    own = range(NUM_TEST + rank, len(labels), world_size)
    test = images[:NUM_TEST], labels[:NUM_TEST]
    model = DistributedDataParallel(network())
    compress(model, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    rows, step, spent = [], 0, torch.zeros(1)
    while spent < seconds:
        start = time.monotonic()
        batch = torch.tensor(own)[torch.randperm(len(own), generator=generator)[:BATCH]]
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        spent += time.monotonic() - start
        dist.broadcast(spent, 0)  # all ranks stop in the same step
        step += 1
        if step % 4 == 0 or spent >= seconds:
            rows.append((spent.item(), accuracy(model, *test)))
    if rank == 0:
        with Path(f"{method}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        print(f"{method}: {step} steps, {spent.item() / step:.3f} s each, accuracy {rows[-1][1]:.3f}")
    dist.destroy_process_group()


def plot() -> None:
    """Draw the accuracy over time."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for path in sorted(Path().glob("*.csv")):
        rows = [(float(seconds), float(share)) for seconds, share in csv.reader(path.read_text().splitlines())]
        axes.plot(*zip(*rows, strict=True), label=path.stem)
    axes.set(xlabel="seconds of training", ylabel="accuracy on the test set", ylim=(0.5, 1))
    axes.legend()
    figure.savefig("throttled.png", dpi=110)


if __name__ == "__main__":
    if sys.argv[1] == "plot":
        plot()
    else:
        train(sys.argv[1], float(sys.argv[2]))
