"""What a step of each method may cost: the goals of `experiments.bench step`, in floors, which stand here alone.

They hold for select + rest at two ranks, density 0.01 and 11 million elements. Variants of a method, `qsgd_published`
or `topk_layers`, have the goal of the method.
"""

FLOORS = {
    **dict.fromkeys(("micro", "cltk", "randomk", "exdyna"), 1.5),
    **dict.fromkeys(("fp16", "bf16", "int8"), 2.0),
    **dict.fromkeys(("topk", "accordion", "deft", "sage", "threshold"), 2.5),
    **dict.fromkeys(("gaussiank", "sidco", "redsync", "dgc"), 4.0),
    **dict.fromkeys(("oktopk", "gtopk", "dsa", "ef21"), 4.0),
    **dict.fromkeys(("qsgd", "terngrad", "natural", "signsgd", "onebit", "sparseloco"), 4.0),
}
NOT_IN_FLOORS = frozenset({"demo", "dense", "fft", "powersgd"})
"""Held against an all-reduce, a transform, products of matrices."""


def goal(method: str) -> float | None:
    """Return the most floors that a step of ``method``, a name of conf/sparsifier, may cost; None: of another kind."""
    return FLOORS.get(method.split("_")[0])


def verdict(method: str, floors: float, bytes_in_floors: float = 0.0) -> str:
    """Return whether a step of ``floors`` meets its goal, as a word of the table; 'no: bytes' where it cannot.

    Args:
        bytes_in_floors: the bytes that a step moves by those that a floor moves: at one speed it takes as many floors.
    """
    most = goal(method)
    if most is None:
        return ""
    return "yes" if floors <= most else "no: bytes" if bytes_in_floors > most else "no"
