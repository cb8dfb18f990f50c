"""The collective operations, by the names under which they are counted, measured and predicted."""

from typing import Literal, get_args

Op = Literal["all_reduce", "gather_rows", "gather_lists", "scatter", "broadcast"]
OPS: tuple[Op, ...] = get_args(Op)
