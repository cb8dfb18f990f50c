"""Measure time and memory of a step of micro.SparseAdamW and of AdamW(foreach=True) with the same gradients.

    python -m experiments.tools.sparse_adam.speed --density 0.01

Steps alternate, so that both see the same load; times are the fastest and the median.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

import micro
from experiments.tools.shared.markdown import table
from micro.drivers.arrivals import note
from micro.reducers.outcome import Latest

SIZES = (2_500_000, 1_000_000, 250_000, 10_000, 500)


def parameters(numel: int, device: str) -> dict[str, Tensor]:
    """Return tensors of several sizes, ``numel`` elements in all."""
    found: dict[str, Tensor] = {}
    while numel:
        size = min(numel, SIZES[len(found) % len(SIZES)])
        found[str(len(found))] = torch.randn(size, device=device)
        numel -= size
    return found


def times(numel: int, density: float, repeats: int, device: str) -> dict[str, list[float]]:
    """Return seconds of each step by name."""
    weights = parameters(numel, device)
    layout = micro.Layout.of(weights)
    twins = {name: weight.clone() for name, weight in weights.items()}
    optimizers = {
        "AdamW(foreach=True)": torch.optim.AdamW(twins.values(), foreach=True),
        "SparseAdamW": micro.SparseAdamW(weights.values(), foreach=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for step in range(repeats):
        arrived = torch.rand(numel, device=device) < density
        vector = torch.randn(numel, device=device) * arrived
        note(weights, layout, Latest(None if density == 1 else lambda mask=arrived: mask))  # type: ignore[misc]
        for name, piece in layout.views(vector).items():
            weights[name].grad = twins[name].grad = piece
        for name, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            if step:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the model (%(default)s)")
    parser.add_argument(
        "--density", type=float, default=0.01, help="share of elements that arrive in a step (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=20, help="steps of each (%(default)s)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(%(default)s)")
    options = parser.parse_args(arguments)
    seconds = times(options.numel, options.density, options.repeats + 1, options.device)
    base = seconds["AdamW(foreach=True)"]
    rows = [
        [name, f"{1e3 * min(own):.1f}", f"{1e3 * median(own):.1f}", f"{min(own) / min(base):.2f}"]
        for name, own in seconds.items()
    ]
    print(table([f"density {options.density:g}", "fastest, ms", "median, ms", "of AdamW"], rows))


if __name__ == "__main__":
    main()
