"""Short trainings with each optimizer variant: a GPT of 0.8 million parameters on tiny Shakespeare, four workers.

    python -m experiments.tools.sparse_adam.screen --root DIR --out results/screen.jsonl

Each worker's gradient is clipped before the residual. A single seed: the screen only shows which variants are worth
repeating. Each finished run is a line of the file, and the same command skips it. The most informative runs come first.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import micro
import models
from experiments.tools.sparse_adam.forms import FORMS, FlatOptimizer

NUM_WORKERS, ROWS, LENGTH, WARM_UP, DECAY = 4, 8, 64, 20, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training of the screen."""

    form: str
    lr: float
    method: str = "micro"
    density: float = 0.01
    steps: int = 300
    seed: int = 0
    shape: str = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)


def plan() -> Iterator[Run]:
    """Yield all runs, the most informative first."""
    for lr, density, form in (
        (1e-3, 0.01, "sign"),
        (1e-3, 0.01, "mean"),
        (1e-3, 0.01, "adamw"),
        (1e-3, 0.1, "sign"),
        (1e-3, 0.1, "mean"),
        (3e-3, 0.1, "adamw"),
        (3e-3, 0.01, "sum"),
        (3e-3, 0.1, "sum"),
    ):
        yield Run(form=form, lr=lr, density=density)
    yield Run(form="adamw", lr=6e-3, method="dense", density=1.0)
    yield Run(form="sign", lr=1e-3, method="micro, signs")
    for form, lr in (
        ("adamw, beta2 by density", 1e-3),
        ("sum, no first moment", 3e-3),
        ("both, no first moment, by receipts", 1e-3),
        ("sum, no first moment, by receipts", 3e-3),
        ("both", 1e-3),
        ("sign, exponent 3/4", 3e-3),
        ("sign, root", 6e-3),
        ("adamw, beta2 by density", 3e-3),
        ("sign, cap 50", 1e-3),
        ("mean, no cap", 1e-3),
        ("mean, by receipts", 1e-3),
        ("sign with momentum", 1e-3),
        ("sign, one step", 3e-3),
    ):
        yield Run(form=form, lr=lr)
    for lr in (5e-4, 2e-3):
        for form in ("sign", "mean"):
            for density in (0.01, 0.1):
                yield Run(form=form, lr=lr, density=density)
    for form in ("sign", "mean"):
        yield Run(form=form, lr=1e-3, steps=900)
        yield Run(form=form, lr=1e-3, density=0.1, steps=900)
        yield Run(form=form, lr=1e-3, method="topk")
    yield Run(form="adamw", lr=1e-3, method="topk")
    for shape in ("constant",):
        for form, lr in (("sign", 1e-3), ("mean", 1e-3), ("sum", 3e-3)):
            yield Run(form=form, lr=lr, shape=shape)
    for form, lr in (("adamw, beta2 by density", 3e-3), ("sum", 3e-3), ("adamw", 1e-3), ("sum, no first moment", 3e-3)):
        yield Run(form=form, lr=lr, steps=900)
    yield Run(form="adamw", lr=6e-3, method="dense", density=1.0, steps=900)


class Training:
    """A GPT whose weights are views of one vector, and the text."""

    def __init__(self, root: Path, seed: int) -> None:
        text = (root / "input.txt").read_text()
        table = {letter: number for number, letter in enumerate(sorted(set(text)))}
        tokens = torch.tensor([table[letter] for letter in text])
        self._train, self._test = tokens.tensor_split([len(tokens) * 9 // 10])
        torch.manual_seed(seed)
        settings: dict[str, Any] = {"hidden": 128, "num_layers": 4, "num_heads": 4, "max_length": LENGTH}
        self.model = models.build("gpt", sizes={"num_words": len(table)}, **settings)
        shapes = dict(self.model.named_parameters())
        self.layout = micro.Layout.of(shapes)
        self.weights = torch.cat([p.detach().flatten() for p in shapes.values()])
        decay = [torch.full((p.numel(),), DECAY if p.ndim > 1 else 0.0) for p in shapes.values()]
        self.decay = torch.cat(decay)
        self.gradients = torch.zeros(NUM_WORKERS, self.layout.numel)
        for name, piece in self.layout.views(self.weights).items():
            shapes[name].data = piece
        self._parameters = shapes
        self._seed = seed
        self._test_rows = self._rows(self._test, 256, -1)

    def compute_gradients(self, step: int) -> None:
        """Fill ``gradients`` (workers, numel), each clipped to norm 1."""
        inputs, targets = self._rows(self._train, NUM_WORKERS * ROWS, step)
        for rank, row in enumerate(self.gradients.zero_()):
            for name, piece in self.layout.views(row).items():
                self._parameters[name].grad = piece
            part = slice(rank * ROWS, (rank + 1) * ROWS)
            self._loss(inputs[part], targets[part]).backward()
            row.mul_(min(1.0, 1.0 / (float(row.norm()) + 1e-6)))

    @torch.no_grad()
    def test_loss(self) -> float:
        """Return nats per character on 256 rows of the last tenth, equal for all runs."""
        return float(self._loss(*self._test_rows))

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs)[0].flatten(0, 1), targets.flatten())

    def _rows(self, tokens: Tensor, num: int, step: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1_000_003 * self._seed + step + 1)
        starts = torch.randint(len(tokens) - LENGTH - 1, (num,), generator=draw)
        places = starts[:, None] + torch.arange(LENGTH + 1)
        return tokens[places[:, :-1]], tokens[places[:, 1:]]


def train(run: Run, root: Path) -> dict[str, Any]:
    """Train and return the result of a run."""
    training, began = Training(root, run.seed), time.perf_counter()
    reducers = {
        "dense": lambda: micro.DenseReducer(),
        "micro": lambda: micro.SparseReducer(micro.Micro(), density=run.density),
        "micro, signs": lambda: micro.SparseReducer(
            micro.Micro(), density=run.density, codec=micro.build(micro.Codec, "sign"), indices=micro.Packed()
        ),
        "topk": lambda: micro.SparseReducer(micro.TopK(), density=run.density),
    }
    simulation = micro.Simulation(reducers[run.method](), training.layout, NUM_WORKERS)
    optimizer = FlatOptimizer(FORMS[run.form], training.weights, betas=run.betas, density=run.density)
    losses = {}
    for step in range(run.steps):
        training.compute_gradients(step)
        simulation.step_(training.gradients)
        rate = run.lr * min((step + 1) / WARM_UP, 1.0)
        if run.shape == "cosine":
            rate *= 0.1 + 0.45 * (1 + math.cos(math.pi * max(0, step - WARM_UP) / (run.steps - WARM_UP)))
        training.weights.sub_(rate * training.decay * training.weights)
        training.weights.sub_(rate * optimizer.direction(training.gradients[0]))
        if (step + 1) % 100 == 0:
            losses[step + 1] = round(training.test_loss(), 4)
    return asdict(run) | {"loss": losses[run.steps], "losses": losses, "seconds": round(time.perf_counter() - began)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Execute the runs that are not yet in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with tiny Shakespeare's input.txt")
    parser.add_argument("--out", type=Path, required=True, help="file of the finished runs, JSON lines")
    options = parser.parse_args(arguments)
    keys = Run.__dataclass_fields__
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    finished = {json.dumps({key: row[key] for key in keys}) for row in done}
    for run in plan():
        if json.dumps(asdict(run)) not in finished:
            row = train(run, options.root)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
