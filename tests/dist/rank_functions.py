"""What ranks of tests call: they add numbers, or one of them fails while the others wait for it."""

import os
import signal
import time

import torch
import torch.distributed as dist

from micro.comm import GroupComm


def add(value: float) -> float:
    print("this is no answer")
    return float(GroupComm().all_reduce_(torch.tensor(value)))


def add_but_one(failing: int, how: str) -> float:
    if dist.get_rank() != failing:
        return add(1.0)
    if how == "raise":
        raise ValueError("this rank does\nnot want to")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
    return 0.0
