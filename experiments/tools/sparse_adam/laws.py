"""Simulate single elements with each optimizer variant: mean movement, and its deviation.

    python -m experiments.tools.sparse_adam.laws

An element's gradient is constant, noise with mean 0, or a signal in noise of ten times its size. Its sum is sent every
tau-th step, or when it exceeds a threshold. Results are relative to dense AdamW with the same gradients at every step.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.tools.shared.markdown import table
from experiments.tools.shared.report_opening import opening
from experiments.tools.sparse_adam.forms import FORMS, FlatOptimizer, Form

STEPS, ELEMENTS, SIGNAL = 3000, 500, 0.1
KINDS = {"constant": (1.0, 0.0), "noise": (0.0, 1.0), "signal in noise": (SIGNAL, 1.0)}  # mean and deviation
HOW_TO_READ = f"""\
Single elements, {STEPS:,} steps. *constant, 100*: the gradient is 1, and its sum comes every 100 steps; the number is
how far the element moves, where AdamW that gets the gradient in every step is 1. *noise*: the gradient is normal
without a mean; the number is the deviation of the movement over {ELEMENTS} elements, over AdamW's. *signal in noise*:
noise with a mean of {SIGNAL:g} deviations; mean ± deviation of the movement, each over AdamW's, where 1 ± 1 is right.
With ``--by-size`` an element is sent when its sum exceeds the root of the number.
"""
MEASURES = {"constant": "{0:.2g}", "noise": "{1:.2g}", "signal in noise": "{0:.2g} ± {1:.2g}"}


def displacements(form: Form, taus: Sequence[int], betas: tuple[float, float], *, by_size: bool = False) -> Tensor:
    """Return the movements of elements in STEPS steps, (kinds, taus, ELEMENTS), in learning rates.

    Args:
        by_size: send an element when its sum is as large as that of noise after tau steps, not every tau steps.
    """
    draw, shape = torch.Generator().manual_seed(0), (len(KINDS), len(taus), ELEMENTS)
    mean, deviation = torch.tensor(list(KINDS.values())).T[:, :, None, None]
    tau = torch.tensor(taus)[:, None].expand(shape)
    phase = (torch.rand(shape, generator=draw) * tau).int()
    residual, moved = torch.zeros(shape), torch.zeros(shape)
    optimizer = FlatOptimizer(form, residual, betas=betas, density=1 / tau)
    for step in range(STEPS):
        residual += mean + deviation * torch.randn(shape, generator=draw)
        is_sent = residual.abs() > tau.sqrt() if by_size else (phase + step) % tau == 0
        update = torch.where(is_sent, residual, 0.0)
        moved += optimizer.direction(update)
        residual -= update
    return moved


def law_table(forms: Sequence[str], taus: Sequence[int], betas: tuple[float, float], *, by_size: bool) -> str:
    """Return a table of mean and deviation of each variant's movements, relative to dense AdamW."""
    dense = displacements(FORMS["adamw"], [1], betas)
    rows = []
    for name in forms:
        own = displacements(FORMS[name], taus, betas, by_size=by_size)
        means, spreads = own.mean(2) / dense.mean(2), own.std(2) / dense.std(2)
        rows.append([name])
        for words, *numbers in zip(MEASURES.values(), means, spreads, strict=True):
            rows[-1] += [words.format(*map(float, pair)) for pair in zip(*numbers, strict=True)]
    columns = [f"{kind}, {tau}" for kind in KINDS for tau in taus]
    return table([f"betas {betas[0]:g}, {betas[1]:g}", *columns], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a page."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taus", default="10,100,300", help="steps that an element waits (%(default)s)")
    parser.add_argument("--forms", default="", help="some of them, by name, with semicolons; all by default")
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95), help="of all forms (%(default)s)")
    parser.add_argument("--by-size", action="store_true", help="elements are sent when their sum is large")
    options = parser.parse_args(words)
    taus = tuple(int(tau) for tau in options.taus.split(","))
    forms = tuple(options.forms.split(";")) if options.forms else tuple(FORMS)
    print(opening("Laws of optimizers for sparse updates", __spec__.name, words, 1))
    print(HOW_TO_READ)
    print(law_table(forms, taus, options.betas, by_size=options.by_size))


if __name__ == "__main__":
    main()
