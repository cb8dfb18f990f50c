"""Measure bytes and seconds of a patch of weights in bfloat16, compared with the whole checkpoint.

    python -m experiments.tools.weight_patches

Weights are normal with a deviation of 0.02. Each moves up or down by the learning rate, as in a step of Adam, in single
precision; both versions are then rounded to bfloat16. Seconds are processor time of one thread, with files on this
disk.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from experiments.tools.shared.markdown import table
from experiments.tools.shared.report_opening import opening
from micro import patches

Result = TypeVar("Result")
LAYER = 4_000_000  # most elements of a tensor
HEADER = "elements, rate, changed, patch MB, checkpoint MB, checkpoint / patch, diff s, write s, read s, apply s"
HOW_TO_READ = """\
Weights in bfloat16, normal with a deviation of 0.02; each moved by the learning rate up or down before rounding, as in
a step of Adam. Seconds are one thread's processor time: *diff* compares and hashes both versions, *apply* hashes the
weights before and after; *write* and *read* are of the patch's file, and in the last two columns of the checkpoint's.
"""


def versions(numel: int, rate: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights before and after a step."""
    draw, old, new = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Tensor]()
    for number, start in enumerate(range(0, numel, LAYER)):
        weights = torch.randn(min(LAYER, numel - start), generator=draw).mul_(0.02)
        old[f"layer{number}"] = weights.bfloat16()
        new[f"layer{number}"] = weights.add_(torch.randn(len(weights), generator=draw).sign_(), alpha=rate).bfloat16()
    return old, new


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of a call, and its processor time in seconds."""
    started = time.process_time()
    return call(), time.process_time() - started


def row(numel: int, rate: float, folder: Path) -> list[str]:
    """Measure one size."""
    (old, new), file, whole = versions(numel, rate), folder / "weights.patch", folder / "weights.pt"
    patch, diff_s = timed(lambda: patches.diff(old, new))
    _, write_s = timed(lambda: patches.save(patch, file))
    loaded, read_s = timed(lambda: patches.load(file))
    _, apply_s = timed(lambda: patches.apply_(old, loaded))
    _, save_s = timed(lambda: torch.save(new, whole))
    _, load_s = timed(lambda: [old[name].copy_(each) for name, each in torch.load(whole, mmap=True).items()])
    sizes = [f"{float(f'{size / 1e6:.3g}'):,g}" for size in (file.stat().st_size, whole.stat().st_size)]
    share, ratio = patch.num_changed / patch.numel, whole.stat().st_size / file.stat().st_size
    seconds = [f"{each:.2g}" for each in (diff_s, write_s, read_s, apply_s, save_s, load_s)]
    return [f"{numel:,}", f"{rate:g}", f"{share:.2%}", *sizes, f"{ratio:.0f}", *seconds]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numels", type=int, nargs="+", default=[800_000, 100_000_000, 1_000_000_000])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        row(1000, 1e-6, Path(folder))  # compiles the loops
        rows = [row(numel, rate, Path(folder)) for numel in given.numels for rate in given.rates]
    print(opening("Patches of weights", __spec__.name, words, 1))
    print(HOW_TO_READ)
    print(table([*HEADER.split(", "), "checkpoint write s", "checkpoint read s"], rows))


if __name__ == "__main__":
    main()
