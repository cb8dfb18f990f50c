"""The optimizer SparseAdamW for sparse updates: an element that waited for tau steps takes tau steps at once."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from micro.optim.waits import Received, WaitingOptimizer, check_max_steps, local

MOMENTS = ("exp_avg", "exp_avg_sq")


class SparseAdamW(WaitingOptimizer):
    """AdamW that pauses an element's moments while it waits for a value, and then catches up.

        micro.attach(ddp_model, reducer)
        optimizer = micro.SparseAdamW(ddp_model.parameters(), lr=1e-3)

    With error feedback an element arrives once in tau steps, as the sum of tau gradients. AdamW normalises it, so the
    sum moves the element only about as far as one gradient, and meanwhile the moments decay. SparseAdamW treats the sum
    as tau equal gradients: the moments decay by beta^tau, and the element takes tau steps at once, at most
    ``max_steps``. Weight decay applies to all elements in every step.

    If every element arrives in every step, it equals torch.optim.AdamW bit for bit: with a dense reducer, density 1,
    PowerSGD or FFT, and inside micro.LocalSteps, whose inner gradients are dense. Its state is AdamW's, plus ``waited``
    (int16, steps since the last arrival) while elements wait. The state is equal on all ranks.

    micro.attach and micro.attach_fsdp report which elements arrived. Without them, and with TwoLevel, an element has
    arrived if its gradient is not exactly zero; unused rows of an embedding, for instance, then wait.

    In a skipped step nothing arrives, and gradients stay in the residual. If ``optimizer.step()`` is not called, as by
    a GradScaler after Inf, or a parameter's gradient is None, the step is not counted. Clip before the exchange
    (``clip`` of micro.attach): as in AdamW, scaling the update has little effect. Anything added to a gradient after
    the exchange is used for elements that arrived, and lost for the others.

    Args:
        params: parameters or groups of them.
        lr: learning rate; as with the next five, see torch.optim.AdamW.
        betas: decay of the two moments in a step.
        eps: added to the root of the second moment.
        weight_decay: decoupled, in every step and for every element.
        maximize: whether to ascend.
        foreach: whether to use torch's multi-tensor functions.
        max_steps: most steps that an element takes at once; with 50, one training of three lost much of its gain.

    Raises:
        ValueError: a setting is out of its range.

    Source: none known for the combination. Moments that decay by beta^tau on arrival: MicroAdam, Modoranu et al.,
    NeurIPS 2024, arXiv 2405.15593, and lazy Adam for embeddings. docs/sparse_optimizers.md names others, with laws and
    trials.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_steps: float = 20,
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state; AdamW's own has no max_steps. Raises: ValueError: it is of AMSGrad."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("max_steps", self.defaults["max_steps"])
            if group.get("amsgrad"):
                raise ValueError("SparseAdamW has no amsgrad, and the state that it was given has amsgrad=True")

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
            steps = [each.state["step"].add_(1).item() for each in alike]  # no wait: on the host
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
    """Take tau steps with each element, in place; elements with tau = 0 do not change.

    Args:
        parameters, grads, firsts, seconds: of one dtype; powers of the betas are computed in single precision.
        steps: number of steps of each parameter, including this one.
    """
    (beta1, beta2), dtype = group["betas"], parameters[0].dtype
    means = torch._foreach_div(grads, _cast(torch._foreach_clamp_min(taus, 1.0), dtype))
    if group["maximize"]:
        torch._foreach_neg_(means)
    torch._foreach_lerp_(firsts, means, _cast(_weights(taus, beta1), dtype))
    torch._foreach_mul_(means, means)
    torch._foreach_lerp_(seconds, means, _cast(_weights(taus, beta2), dtype))
    # over all arrivals, beta^tau multiplies to beta^step: AdamW's bias correction stays valid
    roots = torch._foreach_sqrt(seconds)
    torch._foreach_div_(roots, [math.sqrt(1 - beta2**step) for step in steps])
    torch._foreach_add_(roots, group["eps"])
    moves = torch._foreach_mul(firsts, _cast(torch._foreach_clamp_max(taus, group["max_steps"]), dtype))
    torch._foreach_mul_(moves, [-group["lr"] / (1 - beta1**step) for step in steps])
    torch._foreach_addcdiv_(parameters, moves, roots)


def _weights(taus: list[Tensor], beta: float) -> list[Tensor]:
    """Return 1 - beta^tau, accurate for betas near 1."""
    powers = list(torch._foreach_mul(taus, math.log(beta) if beta else -200.0))  # e^-200 is 0 in single precision
    torch._foreach_expm1_(powers)
    torch._foreach_neg_(powers)
    return powers


def _cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [each.to(dtype) for each in tensors]  # no copy if the dtype is equal
