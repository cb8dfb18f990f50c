"""What is no reducer, where one is wanted."""

from micro.reducers.base import Reducer
from micro.selectors.base import Selector


def check_reducer(reducer: object) -> Reducer:
    """Return the reducer if it is one."""
    if isinstance(reducer, Reducer):
        return reducer
    if isinstance(reducer, Selector):
        name = type(reducer).__name__
        raise ValueError(
            f"reducer must be a micro.Reducer, got the selector {name}: wrap it, "
            f"as in micro.SparseReducer(micro.{name}(), density=0.01)"
        )
    what = f"the class {reducer.__name__}" if isinstance(reducer, type) else repr(reducer)
    example = "micro.SparseReducer(micro.Micro(), density=0.01)"
    raise ValueError(f"reducer must be a micro.Reducer, got {what}: build one, as in {example}")
