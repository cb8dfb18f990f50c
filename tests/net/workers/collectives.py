"""One rank of a test: a few all-reduces and all-gathers; rank 0 prints the seconds of the fastest all-reduce last."""

import sys
import time

import torch
import torch.distributed as dist

from micro.comm.group import GroupComm
from micro.comm.requests import AllGather, AllGatherLists, AllReduce

dist.init_process_group("gloo")
comm = GroupComm()
vector = torch.ones(int(sys.argv[1]))
seconds = []
for _ in range(3):
    started = time.perf_counter()
    comm.answer(AllReduce(mine=vector))
    seconds.append(time.perf_counter() - started)
assert float(vector[-1]) == dist.get_world_size() ** 3
part = vector[: vector.numel() // 8]
rows = comm.answer(AllGather(mine=part))
lists = comm.answer(AllGatherLists(mine=part, counts=[part.numel()] * comm.world_size))
assert torch.equal(rows.view(-1), lists)
dist.barrier()
print(min(seconds), flush=True)
dist.destroy_process_group()
