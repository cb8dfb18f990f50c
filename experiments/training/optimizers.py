"""Build the optimizer, which takes the averaged gradient, and compute the learning rate of each step."""

import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import micro
from experiments.config.schema import OptimizerConfig, TrainConfig

PUBLISHED_NORMS = re.compile(r"\.bn\d")  # norm layers in the public code's sense: it misses those of stem and shortcuts


def build_optimizer(config: OptimizerConfig, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of the averaged gradient; `set_lr_` sets its learning rate before each step."""
    groups = _groups(config, model)
    if config.name == "muon":
        return MuonWithAdamW(groups, lr=lr, betas=(config.betas[0], config.betas[1]), vectors=embeddings(model))
    if config.name == "adam":
        return torch.optim.Adam(groups, lr=lr, betas=(config.betas[0], config.betas[1]))
    if config.name == "sign":
        return micro.SignSGD(groups, lr=lr, max_steps=config.max_steps)
    if config.name == "sparse_adamw":
        return micro.SparseAdamW(groups, lr, (config.betas[0], config.betas[1]), max_steps=config.max_steps)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(config.betas[0], config.betas[1]))
    momentum = config.momentum if config.momentum_at == "update" else 0.0
    nesterov = config.nesterov if config.momentum_at == "update" else "none"
    if nesterov == "published":
        return PublishedNesterov(groups, lr=lr, momentum=momentum)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov == "pytorch")


def set_lr_(optimizer: torch.optim.Optimizer, config: OptimizerConfig, lr: float) -> None:
    """Set the learning rate of the next step; where gradients are already scaled by it, only weight decay changes."""
    for group in optimizer.param_groups:
        group["lr"] = 1.0 if config.scales_gradients else lr
        group["weight_decay"] = group["decay"] * (lr if config.scales_gradients else 1.0)


def zero_gradients_(optimizer: torch.optim.Optimizer) -> None:
    """Set all gradients to zero in one call: they stay views of DDP's buckets, so that nothing is copied."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)


class PublishedNesterov(torch.optim.Optimizer):
    """The step of the MiCRO family's public code: m = momentum * m + g, then g + m.

    Differences: torch.optim.SGD(nesterov=True) steps by g + momentum * m. For a constant gradient and momentum 0.9 this
    step is 11 times the gradient, SGD's 10 times; at momentum 0 it is twice the gradient.
    """

    def __init__(self, params: Iterable[dict[str, object]], *, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_(parameter, group)

    def _step_(self, parameter: Tensor, group: dict[str, float]) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        parameter.add_(gradient.add_(velocity), alpha=-group["lr"])


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for all else, both by one learning rate.

    Source: Jordan et al., 2024, kellerjordan.github.io/posts/muon, as torch.optim.Muon has it, with steps as long as
    AdamW's (Liu et al., arXiv 2502.16982: ``match_rms_adamw``).

    Args:
        groups: as of any optimizer; the matrices of each become a group of their own.
        vectors: parameters of two dimensions that are not for Muon, by id: the rows of an embedding are vectors.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], vectors: Collection[int]
    ) -> None:
        def chosen(are_matrices: bool) -> list[dict[str, Any]]:
            parts = [
                {**group, "params": [p for p in group["params"] if _is_matrix(p, vectors) == are_matrices]}
                for group in groups
            ]
            return [{**part, "is_matrix": are_matrices} for part in parts if part["params"]]

        groups = list(groups)
        kinds: list[tuple[Any, list[dict[str, Any]], dict[str, Any]]] = [
            (torch.optim.Muon, chosen(True), {"adjust_lr_fn": "match_rms_adamw"}),
            (torch.optim.AdamW, chosen(False), {"betas": betas}),
        ]
        self._inner = [kind(own, lr=lr, **settings) for kind, own, settings in kinds if own]
        super().__init__([group for inner in self._inner for group in inner.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        assert closure is None
        for inner in self._inner:
            is_matrix = isinstance(inner, torch.optim.Muon)
            inner.param_groups = [group for group in self.param_groups if group["is_matrix"] == is_matrix]
            inner.state = self.state  # loading a state makes new ones
            inner.step()


def _is_matrix(parameter: Tensor, vectors: Collection[int]) -> bool:
    return parameter.ndim == 2 and id(parameter) not in vectors


def embeddings(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings."""
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def _groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, object]]:
    """Return parameter groups: the parameters with weight decay, and those without."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if config.decay_of == "weights":
        free = {name for name, p in named.items() if p.ndim <= 1}
    elif config.decay_of == "published":
        free = {name for name in named if PUBLISHED_NORMS.search(name)}
    else:
        free = set()
    decayed = [p for name, p in named.items() if name not in free]
    others = [p for name, p in named.items() if name in free]
    groups = [(decayed, config.weight_decay), (others, 0.0)]
    return [{"params": params, "decay": decay, "weight_decay": decay} for params, decay in groups if params]


def learning_rate(config: TrainConfig, epoch: float) -> float:
    """Return the learning rate at a point of its schedule: a linear warm-up, then the configured shape.

    Args:
        epoch: epochs done, with the fraction of the current one.
    """
    progress = min((epoch + 1e-9) / config.lr_warmup_epochs, 1.0) if config.lr_warmup_epochs else 1.0
    warmup = config.lr_warmup_start + (1 - config.lr_warmup_start) * progress
    if config.lr_shape == "steps":
        return config.lr * warmup * config.lr_decay ** sum(epoch >= mark for mark in config.lr_milestones)
    done = max(0.0, epoch - config.lr_warmup_epochs) / max(config.epochs - config.lr_warmup_epochs, 1e-9)
    shape = 1 - done if config.lr_shape == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * warmup * (config.lr_end + (1 - config.lr_end) * shape)
