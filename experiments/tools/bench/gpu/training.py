"""Measure steps of DDP and FSDP2 on a rank: with each method, with plain PyTorch, and with PyTorch's hooks."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import micro
from experiments.tools.bench.gpu import timing
from experiments.tools.bench.tables import Column, Columns
from experiments.tools.ranks.measures import Row, slowest
from experiments.tools.shared.methods import build_methods
from micro.comm.group import GroupComm
from micro.comm.requests import AllGather

DENSITY, LAYERS, BUCKETS, BATCH = 0.01, 8, 4, 16
WARMUP, STEPS = 5, 20
HOOKS = ("DDP alone", "hook fp16", "hook PowerSGD")
SHARDED = ("fully_shard alone", "within bfloat16", "within int8", "between micro")
STEP: Columns = {
    "method": Column("name"),
    "first s": Column("first_s", "{:.2f}"),
    "ms": Column("step_s", "{:.3f}", 1e3),
    "MB sent": Column("sent", "{:.3f}", 1e-6),
    "buckets": Column("buckets"),
    "waits per bucket": Column("waits", "{:.1f}"),
    "launches per bucket": Column("launches", "{:.0f}"),
    "peak MB": Column("peak", "{:.0f}", 1e-6),
    "leak kB": Column("leak", "{:.1f}", 1e-3),
    "problem": Column("problem"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of all parts: cuda or cpu, approximate number of parameters, methods."""

    device: str
    numel: int
    methods: tuple[str, ...]


def device_of(settings: Settings) -> torch.device:
    """Return this rank's device and make it current; ranks share GPUs if there are too few."""
    if settings.device == "cpu":
        return torch.device("cpu")
    local_rank = dist.get_rank() if dist.is_initialized() else 0
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


class Training:
    """A model of `LAYERS` equal layers, about ``numel`` parameters together, and its steps of SGD."""

    def __init__(self, settings: Settings) -> None:
        self.device, self.width = device_of(settings), max(math.isqrt(settings.numel // LAYERS), 8)
        torch.manual_seed(0)
        layers = [[nn.Linear(self.width, self.width), nn.Tanh()] for _ in range(LAYERS)]
        self.net = nn.Sequential(*(part for layer in layers for part in layer)).to(self.device)
        self.model: nn.Module = self.net
        self._number = 0

    def wrap(self) -> DistributedDataParallel:
        """Wrap the model in DDP, with several buckets."""
        size_mb = 4 * LAYERS * self.width**2 / BUCKETS / 2**20
        self.model = wrapped = DistributedDataParallel(self.net, bucket_cap_mb=max(size_mb, 1e-3))
        return wrapped

    def loss(self) -> Tensor:
        """Return the loss of the next batch."""
        randomness = torch.Generator().manual_seed(1000 * dist.get_rank() + self._number)
        self._number += 1
        x = torch.randn(BATCH, self.width, generator=randomness).to(self.device)
        loss: Tensor = (self.model(x) - x).square().mean()
        return loss

    def step(self) -> None:
        """Take a step."""
        self.model.zero_grad()
        self.loss().backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(0.01 * parameter.grad)  # type: ignore[operator]

    def seconds(self, count: int) -> list[float]:
        """Return the seconds of so many steps."""
        return [self._timed() for _ in range(count)]

    def _timed(self) -> float:
        dist.barrier()
        started = time.perf_counter()
        self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return slowest(time.perf_counter() - started, self.device)

    def check_replicas(self) -> str:
        """Return a message if the ranks' weights differ, otherwise None."""
        mine = torch.stack([p.detach().double().sum() for p in self.net.parameters()])
        rows = GroupComm().answer(AllGather(mine=mine))
        return "" if bool((rows == rows[0]).all() and rows.isfinite().all()) else "weights differ between ranks"


def ddp(settings: Settings, name: str) -> list[Row]:
    """Measure steps of DDP with a method, a hook of PyTorch's, or neither."""
    if name == HOOKS[-1] and dist.get_backend() == "gloo" and dist.get_world_size() > 1:
        return [{"name": f"{name}: its callbacks would wait for gloo's own threads"}]
    training = Training(settings)
    attachment = attached(training.wrap(), name)
    (first_s,) = training.seconds(1)
    training.seconds(WARMUP)
    device, memory = training.device, _memory(training.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    row: Row = {"name": name, "first_s": first_s, "step_s": statistics.median(training.seconds(STEPS))}
    if attachment:
        stats = attachment.stats
        sent = sum(each.bytes_sent for each in stats)
        row |= {"buckets": len(stats), "sent": sent}
    if device.type == "cuda":
        row |= {"peak": torch.cuda.max_memory_allocated(device), "leak": _memory(device) - memory}
        per_bucket = 1 / row.get("buckets", BUCKETS)
        row |= {"waits": timing.waits(training.step) * per_bucket, "launches": launches(training.step) * per_bucket}
    return [row | {"problem": training.check_replicas()}]


def attached(model: DistributedDataParallel, name: str) -> micro.Attachment | None:
    """Attach a method to a model, or register a hook of PyTorch's."""
    if name == "hook fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "hook PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name not in HOOKS:
        return micro.attach(model, build_methods([name], DENSITY)[name])
    return None


def launches(work: Callable[[], object]) -> int:
    """Return how many kernels ``work`` launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
    return sum(event.count for event in profile.key_averages() if "LaunchKernel" in event.key)


def _memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def fsdp(settings: Settings, name: str) -> list[Row]:
    """Measure steps of ``fully_shard``: alone, quantised within its reduce-scatter, or between nodes of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    training = Training(settings)
    where, method = name.split(" ", 1)
    size = dist.get_world_size()
    shape = (size, 1) if where == "between" else (1, size)
    mesh = init_device_mesh(settings.device, shape, mesh_dim_names=("node", "local"))
    for layer in training.net.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh["local"])
    fully_shard(training.net, mesh=mesh["local"])
    if where == "between":
        micro.attach_fsdp(training.net, build_methods([method], DENSITY)[method], replicas=mesh["node"])
    elif where == "within":
        if not hasattr(training.net, "set_custom_reduce_scatter"):
            return [{"name": f"{name}: torch {torch.__version__} has no such reduce-scatter"}]
        micro.fsdp.attach_within(training.net, method)
    (first_s,) = training.seconds(1)
    training.seconds(WARMUP)
    if settings.device == "cuda":  # these ranks may have measured other methods before
        torch.cuda.reset_peak_memory_stats()
    row: Row = {"name": name, "first_s": first_s, "step_s": statistics.median(training.seconds(STEPS)), "problem": ""}
    return [row | ({"peak": torch.cuda.max_memory_allocated()} if settings.device == "cuda" else {})]
