"""Variants of an optimizer for sparse updates on a flat vector, which differ in a few settings.

An element that is sent after tau steps receives the sum of tau gradients. The variant ``mean`` is
``micro.SparseAdamW`` with ``max_steps=50``.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPS = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A rule that turns a sum of tau gradients into a step.

    Attributes:
        direction: adam: first moment / sqrt(second); sum: sum / sqrt(second); sign: sign of the sum, without moments;
            mixed sign: sign of half the mean plus half the first moment.
        waits: whether tau is counted, and moments pause while nothing arrives; otherwise a dense optimizer.
        second: input of the second moment: the squared mean (right for constant gradients), the squared sum / tau
            (right for noise), or both: the latter minus (tau - 1) times the squared first moment.
        exponent: the step is multiplied by tau to this power.
        cap: most steps at once.
        memory: whether moments decay by steps (beta^tau) or by arrivals (beta).
        lengthened: betas become 1 - (1 - beta) * density, so that they count arrivals instead of steps.
    """

    direction: Literal["adam", "sum", "sign", "mixed sign"] = "adam"
    waits: bool = True
    second: Literal["mean", "sum", "both"] = "mean"
    exponent: float = 1.0
    cap: float = 50.0
    memory: Literal["steps", "receipts"] = "steps"
    lengthened: tuple[bool, bool] = (False, False)


FORMS: dict[str, Form] = {
    "adamw": Form(waits=False),
    "adamw, beta2 by density": Form(waits=False, lengthened=(False, True)),
    "adamw, both betas by density": Form(waits=False, lengthened=(True, True)),
    "mean": Form(),
    "mean, cap 10": Form(cap=10),
    "mean, no cap": Form(cap=1e9),
    "mean, root": Form(exponent=0.5),
    "mean, by receipts": Form(memory="receipts"),
    "sum": Form(second="sum", cap=1e9),
    "sum, by receipts": Form(second="sum", memory="receipts", cap=1e9),
    "sum, no first moment": Form(direction="sum", second="sum", cap=1e9),
    "sum, no first moment, by receipts": Form(direction="sum", second="sum", memory="receipts", cap=1e9),
    "both": Form(second="both", cap=1e9),
    "both, by receipts": Form(second="both", memory="receipts", cap=1e9),
    "both, no first moment, by receipts": Form(direction="sum", second="both", memory="receipts", cap=1e9),
    "sign": Form(direction="sign", cap=1e9),
    "sign, cap 50": Form(direction="sign"),
    "sign, cap 10": Form(direction="sign", cap=10),
    "sign, exponent 3/4": Form(direction="sign", exponent=0.75, cap=1e9),
    "sign, root": Form(direction="sign", exponent=0.5, cap=1e9),
    "sign, one step": Form(direction="sign", exponent=0.0),
    "sign with momentum, dense": Form(direction="mixed sign", waits=False),
    "sign with momentum": Form(direction="mixed sign"),
}


class FlatOptimizer:
    """One variant applied to a vector (numel,)."""

    def __init__(self, form: Form, like: Tensor, *, betas: tuple[float, float], density: float | Tensor) -> None:
        self.form = form
        self._betas = [1 - (1 - b) * density if yes else b for b, yes in zip(betas, form.lengthened, strict=True)]
        self._waited, self._first, self._second = (torch.zeros_like(like) for _ in range(3))
        self._norms = torch.zeros_like(like), torch.zeros_like(like)  # moments of a constant 1, for bias correction

    def direction(self, grad: Tensor) -> Tensor:
        """Return the movement (numel,) in learning rates, for an update that is zero where nothing arrived."""
        form, sent = self.form, (grad != 0 if self.form.waits else torch.ones_like(grad, dtype=torch.bool))
        self._waited += 1
        tau = torch.where(sent, self._waited, 1.0) if form.waits else torch.ones_like(grad)
        self._waited = torch.where(sent, 0.0, self._waited)
        steps = tau.clamp(max=form.cap) ** form.exponent
        if form.direction == "sign":
            return grad.sign() * steps
        decays = [b if form.memory == "receipts" else b**tau for b in self._betas]
        self._follow_(self._first, self._norms[0], decays[0], grad / tau, sent)
        first = self._first / self._norms[0].clamp_min(1e-30)
        if form.direction == "mixed sign":
            return torch.where(sent, (0.5 * (grad / tau + first)).sign() * steps, 0.0)
        square = grad.square() / (tau.square() if form.second == "mean" else tau)
        self._follow_(self._second, self._norms[1], decays[1], square, sent)
        second = self._second / self._norms[1].clamp_min(1e-30)
        if form.second == "both":
            second = torch.maximum(second - (tau - 1) * first.square(), second / tau)
        taken = first * steps if form.direction == "adam" else grad * (steps / tau)
        return torch.where(sent, taken / (second.sqrt() + EPS), 0.0)

    @staticmethod
    def _follow_(moment: Tensor, norm: Tensor, decay: Tensor | float, value: Tensor, sent: Tensor) -> None:
        moment.copy_(torch.where(sent, decay * moment + (1 - decay) * value, moment))
        norm.copy_(torch.where(sent, decay * norm + (1 - decay), norm))
