"""Settings of the optimizer, and their check."""

import math
from dataclasses import dataclass, field

from experiments.config.errors import UserError, check_choice


@dataclass(kw_only=True)
class OptimizerConfig:
    """How gradients become an update.

    Attributes:
        name: sgd, adam, adamw, whose weight decay leaves Adam's moments alone, or sign: every weight moves by the rate.
        momentum: of sgd.
        nesterov: none; pytorch: a step of g + momentum * m; published: of g + m, as the public code of MiCRO, DEFT,
            ExDyna and SAGE (and PowerSGD, from which they have it) steps, also where the momentum is 0 and the step
            so 2 g.
        betas: of adam and adamw.
        momentum_at: update: the momentum is that of the average; gradient: each worker's own, before its residual (the
            momentum correction of DGC, Lin et al., ICLR 2018, arXiv 1712.01887).
        lr_at: update: residuals hold gradients, and take the learning rate of the step in which they are sent (the
            public code of MiCRO); gradient: residuals hold lr * gradient.
        weight_decay: added to the average, after the exchange.
        decay_of: all parameters; weights: none of one dimension (norms, biases); published: all but norms that are
            named bn1, bn2 and so on inside a block, as the public code of the MiCRO family finds them.
        clip: the greatest norm of a gradient, null for none.
        clip_at: gradient: of each worker's, before its residual is added; update: of the average.
        clip_norm: rank: each worker's own norm, by which it scales alone; global: the root of the mean over workers of
            their squared norms, by which all scale alike. For clip_at=gradient.
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
    clip_norm: str = "rank"

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients are multiplied by the learning rate before they are reduced."""
        return self.lr_at == "gradient"


CHOICES = {
    "name": ("sgd", "adam", "adamw", "sign"),
    "nesterov": ("none", "pytorch", "published"),
    "momentum_at": ("update", "gradient"),
    "lr_at": ("update", "gradient"),
    "decay_of": ("all", "weights", "published"),
    "clip_at": ("gradient", "update"),
    "clip_norm": ("rank", "global"),
}


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise UserError for a setting that is out of its range or has no effect with the others."""
    for key, known in CHOICES.items():
        check_choice(f"optimizer.{key}", known, getattr(config, key))
    if not 0 <= config.momentum < 1:
        raise UserError(f"optimizer.momentum must be in [0, 1), got {config.momentum}")
    if not (math.isfinite(config.weight_decay) and config.weight_decay >= 0):
        raise UserError(f"optimizer.weight_decay must be at least 0, got {config.weight_decay}")
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise UserError(f"optimizer.betas must be two numbers in [0, 1), got {config.betas}")
    if config.clip is not None and not config.clip > 0:
        raise UserError(f"optimizer.clip must be positive, got {config.clip}: leave it out to disable clipping")
    if config.clip is None and config.clip_at != OptimizerConfig.clip_at:
        raise UserError(f"optimizer.clip_at={config.clip_at} needs a clip: set optimizer.clip, or leave it out")
    if config.clip_norm != OptimizerConfig.clip_norm and (config.clip is None or config.clip_at != "gradient"):
        raise UserError(
            f"optimizer.clip_norm={config.clip_norm} is for gradients: set optimizer.clip and "
            "optimizer.clip_at=gradient, or leave it out"
        )
    if config.name != "sgd":
        _refuse_settings_of_sgd(config)
    if config.name not in ("adam", "adamw") and list(config.betas) != OptimizerConfig(name="adam").betas:
        raise UserError(f"optimizer.betas are for adam and adamw, got {config.betas} for {config.name}: leave them out")
    if config.nesterov == "pytorch" and not config.momentum:
        raise UserError("optimizer.nesterov=pytorch needs a momentum above 0, got 0")
    if config.momentum_at == "gradient" and not config.momentum:
        raise UserError("optimizer.momentum_at=gradient needs a momentum above 0, got 0")


def _refuse_settings_of_sgd(config: OptimizerConfig) -> None:
    for key in ("momentum", "nesterov", "momentum_at", "lr_at"):
        if getattr(config, key) != getattr(OptimizerConfig, key):
            raise UserError(f"optimizer.{key} is for sgd, got {getattr(config, key)} for {config.name}: leave it out")
