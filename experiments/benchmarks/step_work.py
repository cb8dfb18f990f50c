"""What each rank of `experiments.bench step` does: time the steps of one method, and a floor beside each of them."""

import torch
from torch import Tensor

from experiments.benchmarks.passes import count_passes
from experiments.benchmarks.step_turns import (
    NUM_TRIED,
    Step,
    TimedSteps,
    Times,
    counts,
    gradients,
    medians,
    reduction,
)
from experiments.launching.measurements import Row, Settings, own_device, slowest
from micro.comm import GroupComm
from micro.density.base import target_count

TOPK = "(torch.topk alone)"  # stands beside the methods, for scale
QUARTILES = torch.tensor([0.25, 0.75], dtype=torch.float64)


def work(settings: Settings) -> Row:
    """Measure one method at one length and density: a row of medians over steps."""
    device, numel, density, method = own_device(), settings["numel"], settings["density"], settings["method"]
    if method == TOPK:
        step = _topk_alone(gradients(numel, density, device)[0], target_count(density, numel))
    else:
        step = reduction(method, numel, density, device)
    steps = TimedSteps(step, numel, density, device)
    warmup, counted = counts(steps.tried(), settings["steps"], settings["limit_s"])
    taken = steps.take(warmup + counted - NUM_TRIED)[-counted:]
    grad = steps.next_gradient()
    visits, least = count_passes(lambda: step(grad), numel), count_passes(steps.floor, numel)
    visited = {
        "passes": visits.passes,
        "bytes_per_element": visits.bytes_per_element,
        "bytes_in_floors": visits.bytes_per_element / least.bytes_per_element,
    }
    most = {key: slowest(value, device) for key, value in visited.items()}
    return {**_in_quartiles(taken), **most, "warmup": warmup, "counted": counted}


def _in_quartiles(taken: list[Times]) -> Row:
    """Return the medians over steps, and the quartiles of floors."""
    row: Row = medians(taken)
    floors = torch.tensor([one["own_s"] / one["floor_s"] for one in taken], dtype=torch.float64)
    del row["own_s"]
    return row | dict(zip(("floors_q1", "floors_q3"), floors.quantile(QUARTILES).tolist(), strict=True))


def _topk_alone(gradient: Tensor, k: int) -> Step:
    """Return a step of torch.topk itself, which nothing is sent after."""
    comm, none = GroupComm(), ("rest_s", "exchange_s", "bytes_sent", "indices_bytes", "values_bytes", "build_up")

    def step(grad: Tensor) -> Times:
        started = comm.now(gradient.device)
        torch.topk(gradient.abs(), k, sorted=False)
        elapsed_s = float(comm.now(gradient.device) - started)
        return {"select_s": elapsed_s, "total_s": elapsed_s, **dict.fromkeys(none, 0.0)}

    return step
