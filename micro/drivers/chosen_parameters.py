"""Which parameters of a model are sparsified, as the arguments of attach say it."""

from collections.abc import Callable, Iterable, Mapping
from glob import escape

from torch import Tensor

from micro.flat import real
from micro.names import as_patterns
from micro.reducers.base import Reducer
from micro.reducers.split import Split
from micro.reducers.wrapping import layers

Choice = str | Iterable[str] | Callable[[str, Tensor], bool]
"""Parameters: patterns of their names, or a function of name and parameter that returns whether it is one of them."""


def split_by(
    reducer: Reducer, parameters: Mapping[str, Tensor], *, only: Choice | None, dense: Choice | None, start_step: int
) -> Reducer:
    """Return ``reducer`` for the chosen ones of the trained ``parameters``; see micro.attach.

    Raises:
        ValueError: a choice that does not fit the model, or a reducer that cannot be split.
    """
    if only is not None or dense is not None or start_step:
        if any(isinstance(layer, Split) for layer in layers(reducer)):
            raise ValueError(
                "reducer split says what is dense, so attach must not: leave out only, dense and start_step"
            )
        reducer = Split(
            reducer=reducer,
            only=_patterns(only, "only", parameters),
            dense=_patterns(dense, "dense", parameters),
            start_step=start_step,
        )
    reducer.check_parameters({name: tuple(real(parameter).shape) for name, parameter in parameters.items()})
    return reducer


def _patterns(choice: Choice | None, setting: str, parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    if choice is None:
        return ()
    if not callable(choice):
        patterns = as_patterns(choice, setting)
    else:
        patterns = tuple(escape(name) for name, parameter in parameters.items() if choice(name, parameter))
    if not patterns:
        raise ValueError(f"{setting} chooses none of the model's trained parameters: leave it out, or choose others")
    return patterns
