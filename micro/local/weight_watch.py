"""Detect weights that changed without a counted step, and trained parameters that are not exchanged."""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from micro.drivers.meeting import content_of
from micro.drivers.wrappers import plain_parameters
from micro.local.checks import OUTSIDE, described, is_trained, parameters_of
from micro.local.fragment import Fragment
from micro.values.flat import real
from micro.values.names import as_patterns, check_matched, matches

LOADED = "load at the start of a round and call restart() on all ranks, or use LocalSteps.load_state_dict"
EVALUATED = "for an evaluation, load inside `with local.global_weights()`"


class WeightWatch:
    """Raises errors for changes of weights that an exchange would undo or leave out.

    Between rounds the parameters equal the global weights. If not, they were loaded, initialised again or changed by
    uncounted steps; a sparse exchange would undo most of that. Within a round, a write looks like a step and counts as
    training, except by load_state_dict.

    Args:
        written: patterns of parameters that the loop itself may write at any time; embeddings with a max_norm are
            included.
        own: parameters that are not exchanged.

    Attributes:
        lends: whether the parameters are temporarily the global weights.

    Raises:
        ValueError: a pattern is invalid, or matches no parameter.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, Tensor], written: str | Iterable[str], own: Collection[Tensor]
    ) -> None:
        patterns = as_patterns(written, "written")
        check_matched(patterns, list(parameters), "written")
        limiting = [module for module in model.modules() if getattr(module, "max_norm", None) is not None]
        limited = {id(parameter) for module in limiting for parameter in module.parameters(recurse=False)}
        self._written = {name for name, p in parameters.items() if matches(patterns, name) or id(p) in limited}
        self._model, self._parameters = model, parameters
        self._known = {id(parameter) for parameter in [*parameters.values(), *own]}
        self._before_load: dict[str, int] | None = None
        self.lends = False

    def check_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise RuntimeError if an optimizer is about to change a parameter that is not exchanged."""
        held = (p for p in parameters_of(optimizers) if p.grad is not None and p.numel())
        stray = next((p for p in held if id(p) not in self._known), None)
        if stray is None:
            return
        name = next((name for name, p in plain_parameters(self._model).items() if p is stray), None)
        if name is None:
            raise RuntimeError(f"optimizer was given {described(stray)} outside of the model: {OUTSIDE}")
        raise _not_exchanged(name)

    def check(self, fragments: Sequence[Fragment], remedy: str = "") -> None:
        """Check that only counted steps changed weights since the last exchange.

        Fragments with allowed writes of the loop are marked as different from the global weights.

        Args:
            remedy: advice that comes first in the error.

        Raises:
            RuntimeError: weights changed otherwise, trained parameters are not exchanged, or the weights are lent.
        """
        self.check_lent()
        together = [fragment for fragment in fragments if not fragment.has_local_progress]
        if together:
            self._check_replaced()
        for fragment in together:
            changed = [name for vector in fragment.vectors for name in vector.changed()]
            other = next((name for name in changed if name not in self._written), None)
            if other is not None:
                raise RuntimeError(
                    f"'{other}' was changed since the last exchange, and not by a counted step: {remedy}call "
                    "restart() on all ranks after loading or initialising weights, and name in written= what the loop "
                    "itself clamps or normalises"
                )
            fragment.has_local_progress = bool(changed)
        self._check_loaded()

    def check_lent(self) -> None:
        """Raise RuntimeError while the weights are lent."""
        if self.lends:
            raise RuntimeError(
                "weights are currently those of global_weights() and would be lost: leave its context before"
            )

    def forget_load(self) -> None:
        """Accept the current weights, whatever was loaded."""
        self._before_load = None

    def note_load(self) -> None:
        """Store a checksum of the weights that load_state_dict is about to replace."""
        if self._before_load is None and not self.lends:
            self._before_load = self._checksums()

    def hooks(self) -> list[Any]:
        """Register hooks that record loads into any module of the model; return their handles."""
        return [each.register_load_state_dict_pre_hook(_OnLoad(self)) for each in self._model.modules()]

    def _check_replaced(self) -> None:
        """Raise RuntimeError if the model's trained parameters are not those that are exchanged."""
        for name, parameter in plain_parameters(self._model).items():
            if is_trained(parameter) and id(parameter) not in self._known:
                raise _not_exchanged(name)

    def _check_loaded(self) -> None:
        """Raise RuntimeError if weights were loaded, unless the earlier ones were loaded again."""
        before = self._before_load
        now = self._checksums() if before is not None else {}
        name = next((name for name, checksum in now.items() if before and before[name] != checksum), None)
        if name is not None:
            raise RuntimeError(f"'{name}' was loaded, which the exchange would partly undo: {LOADED}; {EVALUATED}")
        self._before_load = None

    def _checksums(self) -> dict[str, int]:
        return {name: zlib.crc32(content_of(real(p.detach()))) for name, p in self._parameters.items()}


class _OnLoad:
    """A hook of load_state_dict. In a copied or pickled model it does nothing."""

    __slots__ = ("_watch",)

    def __init__(self, watch: WeightWatch) -> None:
        self._watch = watch

    def __call__(self, *_: object) -> None:
        self._watch.note_load()

    def __reduce__(self) -> Any:
        return getattr, ("", "format")  # takes any arguments


def _not_exchanged(name: str) -> RuntimeError:
    return RuntimeError(
        f"'{name}' is trained now and was not when the local steps were made, so that nobody would exchange it: close "
        "them, and make new ones with it"
    )
