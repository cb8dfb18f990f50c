"""Teach a small network the outputs of another, sharded within nodes, with a sparse exchange between them."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import micro


def main(words: list[str] | None = None) -> list[float]:
    """Train and return the losses of this rank's batches."""
    parser = argparse.ArgumentParser()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    parser.add_argument("--ranks-per-node", type=int, default=ranks_per_node, help="those that share one model")
    parser.add_argument("--steps", type=int, default=100, help="stop after this step")
    parser.add_argument("--checkpoint", help="folder to resume from, if it is there, and to save in at the end")
    args = parser.parse_args(words)

    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    num_nodes = dist.get_world_size() // args.ranks_per_node
    mesh = init_device_mesh(device, (num_nodes, args.ranks_per_node), mesh_dim_names=("node", "local"))

    torch.manual_seed(0)  # the same weights on all nodes
    teacher = nn.Linear(64, 1).to(device)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["local"])  # within a node: not over the whole mesh, which FSDP averages densely
    fully_shard(model, mesh=mesh["local"])
    reducer = micro.SparseReducer(micro.Micro(), density=0.01)
    attachment = micro.attach_fsdp(model, reducer, replicas=mesh["node"])  # between nodes

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    state = {"micro": micro.RankStates(attachment), "step": 0}
    if args.checkpoint and os.path.exists(os.path.join(args.checkpoint, ".metadata")):
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    losses = []
    for step in range(state["step"], args.steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())  # every rank draws its own samples
        inputs = torch.randn(32, 64, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    if args.checkpoint:
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        state["step"] = args.steps
        dcp.save(state, checkpoint_id=args.checkpoint)
    attachment.close()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
