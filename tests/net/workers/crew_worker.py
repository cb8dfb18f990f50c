"""Ranks of a crew that add numbers, or fail."""

import os
import signal

import torch
import torch.distributed as dist

from experiments.launching.crew import serve
from micro.comm import GroupComm


def add(value: float) -> float:
    print("this is no answer")
    return float(GroupComm().all_reduce_(torch.tensor(value)))


def add_but_one(*, dies: int = -1, raises: int = -1) -> float:
    if dist.get_rank() == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == raises:
        raise ValueError("this rank does\nnot want to")
    return add(1.0)


if __name__ == "__main__":
    serve({"add": add, "add_but_one": add_but_one})
