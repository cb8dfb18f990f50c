"""Weights that something else than a counted step has changed, and parameters that nobody would exchange."""

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
    """Refuses what the exchange would undo, or leave out.

    Between rounds the parameters are the global weights. What else they are then was loaded, initialised anew or moved
    by steps that no hook counted: the exchange would take it for movement, and a sparse one undo most of it. Within a
    round a write cannot be told from a step, and is movement, unless load_state_dict wrote.

    Args:
        written: patterns of parameters that the loop itself writes, which is movement whenever it does; embeddings
            with a max_norm are such.
        own: parameters that each rank keeps to itself.

    Attributes:
        lends: whether the parameters are the global weights for a while, and are given back.

    Raises:
        ValueError: a pattern is none, or matches no parameter.
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
        """Raise RuntimeError where an optimizer is about to change a parameter that nobody exchanges."""
        held = (p for p in parameters_of(optimizers) if p.grad is not None and p.numel())
        stray = next((p for p in held if id(p) not in self._known), None)
        if stray is None:
            return
        name = next((name for name, p in plain_parameters(self._model).items() if p is stray), None)
        if name is None:
            raise RuntimeError(f"optimizer was given {described(stray)} outside of the model: {OUTSIDE}")
        raise _not_exchanged(name)

    def check(self, fragments: Sequence[Fragment], remedy: str = "") -> None:
        """Look for weights that were changed since the last exchange, other than by counted steps.

        Fragments in which the loop has written what it may are apart from the global weights then.

        Args:
            remedy: to name first.

        Raises:
            RuntimeError: there are such, or trained parameters that are not exchanged, or the weights are lent.
        """
        self.check_lent()
        together = [fragment for fragment in fragments if not fragment.is_apart]
        if together:
            self._check_replaced()
        for fragment in together:
            changed = [name for vector in fragment.vectors for name in vector.changed()]
            other = next((name for name in changed if name not in self._written), None)
            if other is not None:
                raise RuntimeError(
                    f"'{other}' was changed since the last exchange, and not by a step that was counted: {remedy}call "
                    "restart() on all ranks after loading or initialising weights, and name in written= what the loop "
                    "itself clamps or normalises"
                )
            fragment.is_apart = bool(changed)
        self._check_loaded()

    def check_lent(self) -> None:
        """Raise RuntimeError while the weights are lent."""
        if self.lends:
            raise RuntimeError("weights are those of global_weights() now and would be lost: leave its context before")

    def forget_load(self) -> None:
        """Take the weights for right, whatever was loaded."""
        self._before_load = None

    def note_load(self) -> None:
        """Keep a checksum of the weights that load_state_dict is about to replace."""
        if self._before_load is None and not self.lends:
            self._before_load = self._checksums()

    def hooks(self) -> list[Any]:
        """Return handles of hooks that note what is loaded into a part of the model."""
        return [each.register_load_state_dict_pre_hook(_OnLoad(self)) for each in self._model.modules()]

    def _check_replaced(self) -> None:
        """Raise RuntimeError where the model has other parameters to train than are exchanged."""
        for name, parameter in plain_parameters(self._model).items():
            if is_trained(parameter) and id(parameter) not in self._known:
                raise _not_exchanged(name)

    def _check_loaded(self) -> None:
        """Raise RuntimeError where weights were loaded, unless those before were loaded again."""
        before = self._before_load
        now = self._checksums() if before is not None else {}
        name = next((name for name, checksum in now.items() if before and before[name] != checksum), None)
        if name is not None:
            raise RuntimeError(f"'{name}' was loaded, which the exchange would undo in part: {LOADED}; {EVALUATED}")
        self._before_load = None

    def _checksums(self) -> dict[str, int]:
        return {name: zlib.crc32(content_of(real(p.detach()))) for name, p in self._parameters.items()}


class _OnLoad:
    """A hook of load_state_dict. A copy of it, in a model that was copied or pickled, does nothing."""

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
