"""One rank of two hosts with two: steps of two levels, then lists of all ranks; what left for another host comes last.

The last words are the bytes that this rank counted to other hosts, and those of its lists to the other host.
"""

import sys

import torch
import torch.distributed as dist

import micro
from micro.comm.group import GroupComm
from micro.comm.requests import AllGather, AllGatherLists

numel, num_steps = int(sys.argv[1]), int(sys.argv[2])
reducer = micro.TwoLevel(reducer=micro.SparseReducer(micro.Micro(), density=0.01), ranks_per_node=2)

dist.init_process_group("gloo")
comm = GroupComm()
reducer.prepare(comm, torch.device("cpu"))
state = reducer.start(micro.Layout.flat(numel), torch.float32, torch.device("cpu"))
sent = 0.0
for step in range(num_steps):
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + comm.rank))
    comm.begin_step()
    sent += reducer.reduce_(state, grad, comm).between_bytes
everyone = comm.answer(AllGather(mine=grad[:1000]))
assert all(torch.equal(everyone[0], row) for row in everyone), "replicas drift apart"
dist.barrier()

counts = [int(word) for word in sys.argv[3:]]
comm.begin_step()
mine = torch.full((counts[comm.rank],), comm.rank, dtype=torch.int32)
lists = comm.answer(AllGatherLists(mine=mine, counts=counts, kind="indices")).split(counts)
assert [part.unique().tolist() for part in lists] == [[rank] for rank in range(len(counts))]
assert [part.numel() for part in lists] == counts
leaves = comm.rank % 2 == 1  # in a ring in the order of ranks
dist.barrier()
print(sent, comm.traffic.num_bytes["indices"] if leaves else 0.0, flush=True)
dist.destroy_process_group()
