"""Describe what the workers of a run exchange, and how often, from its flat configuration."""

from collections.abc import Mapping

Config = Mapping[str, object]
ROUNDS = "rounds."
OPTIMIZERS = {"muon": "Muon", "sparse_adamw": "SparseAdamW"}
USUAL_BETA2 = 0.999  # or less
USUAL: Config = {
    "rounds.fragments": 1,
    "rounds.delay": 0,
    "rounds.mix": 1,
    "rounds.buffers": "mean",
    "rounds.momentum_with_feedback": False,
}


def exchanged(config: Config) -> str:
    """Return what is exchanged: gradients, of one step or added up over several, steps, differences, momentum."""
    every, added = _whole(config, "rounds.every", 0), _whole(config, "accumulate", 1)
    if every:
        return f"differences of {every} steps" if every > 1 else "each worker's own step"
    if config.get("sparsifier.reducer.name") == "dct":
        return "momentum"
    return f"gradients of {added} steps" if added > 1 else "gradients"


def interval(config: Config) -> int:
    """Return between how many batches of a worker there is an exchange."""
    return (_whole(config, "rounds.every", 0) or 1) * _whole(config, "accumulate", 1)


def outer(config: Config) -> str:
    """Return the outer optimizer, ``Nesterov 0.7/0.9`` for these lr and momentum; empty where it is the mean alone."""
    lr, momentum = _number(config, "rounds.lr", 1.0), _number(config, "rounds.momentum", 0.0)
    if momentum:
        kind = "Nesterov" if str(config.get("rounds.nesterov", False)).lower() == "true" else "momentum"
        return f"{kind} {lr:g}/{momentum:g}"
    return "" if lr == 1 else f"outer rate {lr:g}"


def inner(config: Config) -> str:
    """Return the optimizer that takes the steps, empty for AdamW with a usual beta2 and for others without a name."""
    name, betas = str(config.get("optimizer.name")), config.get("optimizer.betas")
    if name == "adamw" and isinstance(betas, list) and betas[1] > USUAL_BETA2:
        return f"beta2 {betas[1]:g}"
    steps = _whole(config, "optimizer.max_steps", 1)
    waits = f", {steps} steps" if steps > 1 else ""  # at once, at most
    if name == "sign":
        return f"SignSGD{waits}" if waits else ""
    return OPTIMIZERS.get(name, "") + waits


def short(config: Config) -> str:
    """Return in how many steps and by what outer optimizer differences are exchanged, ``H=30, Nesterov 0.7/0.9``.

    Empty for a run that exchanges gradients.
    """
    every = _whole(config, "rounds.every", 0)
    others = [
        f"{key.removeprefix(ROUNDS)}={config[key]}" for key, usual in USUAL.items() if config.get(key, usual) != usual
    ]
    return ", ".join(word for word in (f"H={every}", outer(config), *others) if word) if every else ""


def _whole(config: Config, key: str, usual: int) -> int:
    return int(str(config.get(key, usual)))


def _number(config: Config, key: str, usual: float) -> float:
    return float(str(config.get(key, usual)))
