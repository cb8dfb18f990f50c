"""AdamW for updates that are mostly zero: an element that has waited for tau steps takes tau steps at once."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from micro.optim.waits import Received, WaitingOptimizer, check_max_steps, local

MOMENTS = ("exp_avg", "exp_avg_sq")


class SparseAdamW(WaitingOptimizer):
    """AdamW whose moments stand still for an element while it waits, and that then makes up for the wait.

        micro.attach(ddp_model, reducer)
        optimizer = micro.SparseAdamW(ddp_model.parameters(), lr=1e-3)

    With error feedback an element is sent once in tau steps, with the sum of their gradients. AdamW divides by the size
    of what it gets, so that the sum moves the element about as far as one gradient would, and in between its moments
    decay. Here the sum counts as tau gradients of its mean: the moments decay by beta^tau, and the element takes tau
    steps at once, at most ``max_steps``. Weight decay is that of each step, for all elements.

    Where every element comes in every step it is torch.optim.AdamW, bit for bit: with a dense reducer, at density 1,
    with PowerSGD or FFT, and within micro.LocalSteps, whose workers step by their own gradients. Its state is AdamW's,
    and while elements wait ``waited``, int16: steps since the last value came. Ranks have the same state.

    What came is known of micro.attach and micro.attach_fsdp. Without them, and with TwoLevel, an element came if its
    gradient is not exactly zero, so that one whose gradient is zero, as of an unused row of an embedding, waits.

    A step that is skipped brings nothing: all elements wait on, and their gradients wait in the residual. A step that
    is not taken (``optimizer.step()`` left out, as a GradScaler does after Inf) is not counted. Nor is one for a
    parameter whose gradient is None. Clip before the exchange (``clip`` of micro.attach): a factor on what is sent
    does little here, as in AdamW. Whatever a loop adds to a gradient after the exchange is used with what came, and
    lost where nothing did.

    Args:
        params: parameters or groups of them.
        lr, betas, eps, weight_decay, maximize, foreach: as of torch.optim.AdamW.
        max_steps: the most steps that an element takes at once.

    Raises:
        ValueError: a setting is out of its range.

    Source: none that we found for the combination. Moments that decay by beta^tau when an entry comes: MicroAdam,
    Modoranu et al., NeurIPS 2024, arXiv 2405.15593, and lazy Adam optimizers of embeddings. docs/sparse_optimizers.md
    names others, and has the laws and trials.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_steps: float = 50,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if isinstance(value, Tensor) or not 0 <= value < math.inf:
                raise ValueError(f"{name} of SparseAdamW must be a number of at least 0, got {value}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas of SparseAdamW must be two numbers in [0, 1), got {betas}")
        check_max_steps(self, max_steps)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_steps": max_steps}
        super().__init__(params, {**settings, "maximize": maximize, "foreach": foreach})

    def _start(self, parameter: Tensor) -> dict[str, Any]:
        return {"step": torch.tensor(0.0), **{name: torch.zeros_like(parameter) for name in MOMENTS}}

    def _update_whole_(self, received: list[Received], group: dict[str, Any]) -> None:
        first, second = ([local(each.state[name]) for each in received] for name in MOMENTS)
        adamw(
            [each.parameter for each in received],
            [each.grad for each in received],
            first,
            second,
            [],
            [each.state["step"] for each in received],
            foreach=group["foreach"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _update_(self, received: Iterable[list[Received]], group: dict[str, Any]) -> None:
        for alike in received:
            steps = [each.state["step"].add_(1).item() for each in alike]  # of the host
            torch._foreach_mul_([each.parameter for each in alike], 1 - group["lr"] * group["weight_decay"])
            parts = [each.part(MOMENTS) for each in alike]
            columns = [list(column) for column in zip(*(tensors for tensors, _ in parts), strict=True)]
            advance_(*columns, steps=steps, group=group)
            for number, (_, put_back) in enumerate(parts):
                if put_back is not None:
                    put_back([column[number] for column in columns])


def advance_(
    parameters: list[Tensor],
    grads: list[Tensor],
    taus: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    *,
    steps: list[float],
    group: dict[str, Any],
) -> None:
    """Take tau steps with each element, in place; where tau is 0 nothing changes.

    Args:
        parameters, grads, firsts, seconds: of one dtype; powers of the betas are taken in single precision.
        steps: taken so far with each parameter, this one included.
    """
    (beta1, beta2), dtype = group["betas"], parameters[0].dtype
    means = torch._foreach_div(grads, _in(torch._foreach_clamp_min(taus, 1.0), dtype))
    if group["maximize"]:
        torch._foreach_neg_(means)
    torch._foreach_lerp_(firsts, means, _in(_weights(taus, beta1), dtype))
    torch._foreach_mul_(means, means)
    torch._foreach_lerp_(seconds, means, _in(_weights(taus, beta2), dtype))
    # the powers of beta of all receipts multiply to beta^step: AdamW's corrections hold for what came now
    roots = torch._foreach_sqrt(seconds)
    torch._foreach_div_(roots, [math.sqrt(1 - beta2**step) for step in steps])
    torch._foreach_add_(roots, group["eps"])
    moves = torch._foreach_mul(firsts, _in(torch._foreach_clamp_max(taus, group["max_steps"]), dtype))
    torch._foreach_mul_(moves, [-group["lr"] / (1 - beta1**step) for step in steps])
    torch._foreach_addcdiv_(parameters, moves, roots)


def _weights(taus: list[Tensor], beta: float) -> list[Tensor]:
    """Return 1 - beta^tau, precisely also for betas near 1."""
    powers = list(torch._foreach_mul(taus, math.log(beta) if beta else -200.0))  # e^-200 is 0 in single precision
    torch._foreach_expm1_(powers)
    torch._foreach_neg_(powers)
    return powers


def _in(tensors: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [each.to(dtype) for each in tensors]  # no copy where it has the dtype
