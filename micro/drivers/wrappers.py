"""Unwrap models (DDP, torch.compile ...), and remove the wrappers' prefixes from parameter names."""

import gc
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_INSIDE = ("_forward_module", "_orig_mod")  # attributes of Fabric's and compiled modules
_WORDS = frozenset({"_orig_mod", "_forward_module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def unwrapped(model: Any) -> DistributedDataParallel:
    """Return the DistributedDataParallel inside the wrappers of torch.compile, Fabric and Lightning.

    Raises:
        ValueError: there is none inside.
    """
    inner = model
    while not isinstance(inner, DistributedDataParallel):
        parts = vars(inner).get("_modules", {}) if isinstance(inner, nn.Module) else {}
        found = next((parts[name] for name in _INSIDE if parts.get(name) is not None), None)
        if found is None:
            raise ValueError(f"model must be wrapped in DistributedDataParallel, {_instead(model)}")
        inner = found
    return inner


def _instead(model: Any) -> str:
    """Return for an error message what a model without DistributedDataParallel is, and what to do."""
    names = {base.__name__ for base in type(model).__mro__}
    if "FSDPModule" in names:
        return "got one of fully_shard: use micro.attach_fsdp, between the nodes that hold its replicas"
    if "FullyShardedDataParallel" in names:
        return "got FullyShardedDataParallel (FSDP1), which has no hook: use fully_shard and micro.attach_fsdp"
    if any(hook.__qualname__.startswith("_ReplicateState.") for hook in getattr(model, "_forward_hooks", {}).values()):
        return "got one of torch's replicate, which is not supported: wrap it in DistributedDataParallel instead"
    return (
        f"got {type(model).__name__}: frameworks wrap it where two or more processes are started, for instance by "
        "torchrun; for a loop that exchanges nothing by itself use micro.LocalSteps"
    )


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of parameters without the prefixes of wrappers, by full name; checkpoints use them.

    The prefixes are ``_orig_mod`` (torch.compile), ``_forward_module`` (Fabric), ``_checkpoint_wrapped_module``, and
    ``module`` if all names begin with it. If two names became equal, all stay as they are.
    """
    full = list(names)
    plain = [".".join(word for word in name.split(".") if word not in _WORDS) for name in full]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return dict(zip(full, plain if len(set(plain)) == len(full) else full, strict=True))


def plain_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module by their names without wrappers."""
    parameters = dict(module.named_parameters())
    return {plain: parameters[name] for name, plain in plain_names(parameters).items()}


def kept_parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP was not told to ignore, by their names without wrappers."""
    parameters, ignored = dict(model.module.named_parameters()), set(model.parameters_to_ignore)
    names = plain_names(parameters)
    return {names[name]: parameter for name, parameter in parameters.items() if name not in ignored}


def reduced_parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP reduces, by their names without wrappers."""
    return {name: parameter for name, parameter in kept_parameters(model).items() if parameter.requires_grad}


def ddp_models() -> list[DistributedDataParallel]:
    """Return all DistributedDataParallel models of this process; slow, as it walks over all objects."""
    return [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
