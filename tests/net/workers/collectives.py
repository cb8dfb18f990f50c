"""One rank of a test: a few all-reduces and all-gathers; rank 0 prints the seconds of the fastest all-reduce last."""

import sys
import time

import torch
import torch.distributed as dist

from micro.comm import GroupComm

dist.init_process_group("gloo")
comm = GroupComm()
vector = torch.ones(int(sys.argv[1]))
seconds = []
for _ in range(3):
    started = time.perf_counter()
    comm.all_reduce_(vector)
    seconds.append(time.perf_counter() - started)
assert float(vector[-1]) == dist.get_world_size() ** 3
rows = comm.gather_rows(vector[: vector.numel() // 8])
pieces = comm.gather_lists(vector[: vector.numel() // 8], [vector.numel() // 8] * comm.world_size, "values")
assert torch.equal(rows.view(-1), torch.cat(pieces))
dist.barrier()
print(min(seconds), flush=True)
dist.destroy_process_group()
