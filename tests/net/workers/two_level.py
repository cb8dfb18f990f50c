"""One rank of two hosts with two: steps of two levels; what this rank counted to other hosts is the last word."""

import sys

import torch
import torch.distributed as dist

import micro

numel, num_steps = int(sys.argv[1]), int(sys.argv[2])
reducer = micro.TwoLevel(reducer=micro.SparseReducer(micro.Micro(), density=0.01), ranks_per_node=2)

dist.init_process_group("gloo")
comm = micro.GroupComm()
reducer.prepare(comm, torch.device("cpu"))
state = reducer.start(micro.Layout.flat(numel), torch.float32, torch.device("cpu"))
sent = 0.0
for step in range(num_steps):
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + comm.rank))
    comm.begin_step()
    sent += reducer.reduce_(state, grad, comm).between_bytes
everyone = comm.gather_rows(grad[:1000])
assert all(torch.equal(everyone[0], row) for row in everyone), "replicas drift apart"
dist.barrier()
print(sent, flush=True)
dist.destroy_process_group()
