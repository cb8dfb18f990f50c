"""From the average gradient to new weights: what is set, what the authors' public code does, and PyTorch's own."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from experiments.config.errors import UserError, suggestion

PUBLISHED_NORMS = re.compile(r"\.bn\d")  # how the public code tells norms: those of stem and shortcuts are not found


@dataclass(kw_only=True)
class OptimizerConfig:
    """How gradients become an update.

    Attributes:
        name: sgd or adam.
        momentum: of sgd.
        nesterov: none; pytorch: a step of g + momentum * m; published: of g + m, as the public code of MiCRO, DEFT,
            ExDyna and SAGE (and PowerSGD, from which they have it) steps, also where the momentum is 0 and the step
            so 2 g.
        betas: of adam.
        momentum_at: update: the momentum is that of the average; gradient: each worker's own, before its residual (the
            momentum correction of DGC, Lin et al., ICLR 2018, arXiv 1712.01887).
        lr_at: update: residuals hold gradients, and take the learning rate of the step in which they are sent (the
            public code of MiCRO); gradient: residuals hold lr * gradient.
        weight_decay: added to the average, after the exchange.
        decay_of: all parameters; weights: none of one dimension (norms, biases); published: all but norms that are
            named bn1, bn2 and so on inside a block, as the public code of the MiCRO family finds them.
        clip: the greatest norm of a gradient, None for none.
        clip_at: gradient: of each worker's, before its residual is added; update: of the average.
    """

    name: str
    momentum: float = 0.0
    nesterov: str = "none"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    momentum_at: str = "update"
    lr_at: str = "update"
    weight_decay: float = 0.0
    decay_of: str = "all"
    clip: float | None = None
    clip_at: str = "gradient"

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients are multiplied by the learning rate before they are reduced."""
        return self.lr_at == "gradient"


CHOICES = {
    "name": ("sgd", "adam"),
    "nesterov": ("none", "pytorch", "published"),
    "momentum_at": ("update", "gradient"),
    "lr_at": ("update", "gradient"),
    "decay_of": ("all", "weights", "published"),
    "clip_at": ("gradient", "update"),
}


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise UserError for a setting out of its range, or one that another makes meaningless."""
    for key, known in CHOICES.items():
        given = getattr(config, key)
        if given not in known:
            hint = suggestion(given, known)
            raise UserError(f"optimizer.{key} must be one of {', '.join(known)}, got '{given}'{hint}")
    if not 0 <= config.momentum < 1:
        raise UserError(f"optimizer.momentum must be in [0, 1), got {config.momentum}")
    if not (math.isfinite(config.weight_decay) and config.weight_decay >= 0):
        raise UserError(f"optimizer.weight_decay must be at least 0, got {config.weight_decay}")
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise UserError(f"optimizer.betas must be two numbers in [0, 1), got {config.betas}")
    if config.clip is not None and not config.clip > 0:
        raise UserError(f"optimizer.clip must be positive, got {config.clip}: leave it out to clip nothing")
    if config.clip is None and config.clip_at != OptimizerConfig.clip_at:
        raise UserError(f"optimizer.clip_at={config.clip_at} needs a clip: set optimizer.clip, or leave it out")
    if config.name == "adam":
        _refuse_of_adam(config)
    elif list(config.betas) != OptimizerConfig(name="adam").betas:
        raise UserError(f"optimizer.betas are of adam, got {config.betas} for {config.name}: leave them out")
    if config.nesterov == "pytorch" and not config.momentum:
        raise UserError("optimizer.nesterov=pytorch needs a momentum above 0, got 0")
    if config.momentum_at == "gradient" and not config.momentum:
        raise UserError("optimizer.momentum_at=gradient needs a momentum above 0, got 0")


def _refuse_of_adam(config: OptimizerConfig) -> None:
    for key in ("momentum", "nesterov", "momentum_at", "lr_at"):
        if getattr(config, key) != getattr(OptimizerConfig, key):
            raise UserError(f"optimizer.{key} is of sgd, got {getattr(config, key)} for adam: leave it out")


def build_optimizer(config: OptimizerConfig, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of the average gradient; `set_lr_` sets its learning rate from step to step."""
    groups = _groups(config, model)
    if config.name == "adam":
        return torch.optim.Adam(groups, lr=lr, betas=(config.betas[0], config.betas[1]))
    momentum = config.momentum if config.momentum_at == "update" else 0.0
    nesterov = config.nesterov if config.momentum_at == "update" else "none"
    if nesterov == "published":
        return PublishedNesterov(groups, lr=lr, momentum=momentum)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov == "pytorch")


def set_lr_(optimizer: torch.optim.Optimizer, config: OptimizerConfig, lr: float) -> None:
    """Let the next step take the learning rate ``lr``, wherever it enters."""
    for group in optimizer.param_groups:
        group["lr"] = 1.0 if config.scales_gradients else lr
        group["weight_decay"] = group["decay"] * (lr if config.scales_gradients else 1.0)


class PublishedNesterov(torch.optim.Optimizer):
    """The step of the MiCRO family's public code: m = momentum * m + g, then g + m.

    Differences from torch.optim.SGD(nesterov=True): that steps by g + momentum * m. In a steady state this one moves 11
    gradients a step at momentum 0.9, PyTorch's 10; at momentum 0 it moves twice the gradient.
    """

    def __init__(self, params: Iterable[dict[str, object]], *, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step by the gradients that are there."""
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


def _groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, object]]:
    """Return the parameters, those with weight decay apart from those without."""
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
