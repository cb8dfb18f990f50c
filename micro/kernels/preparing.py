"""Compile or load the forms of kernels before the first step, and say why the start takes long."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Timer

import torch

from micro import kernels

NOTE_S = 1.0  # of compiling, after which a user is told why the start takes so long
TRITON_NOTE_S = 5.0  # of loading or compiling
CPU = torch.device("cpu")


@cache
def prepare(device: torch.device = CPU) -> None:
    """Compile or load the forms that most steps use on a device, and check a GPU's, so that no step waits for it."""
    x = torch.ones(2, device=device)
    if not (kernels.compiled(x) or kernels.on_gpu(x)):
        return
    places = torch.zeros(1 << 13, dtype=torch.int32, device=device)
    with _noted(loops=kernels.compiled(x)):
        kernels.absorb_(x, torch.ones(2, device=device))
        kernels.absorb_and_sum_(x, torch.ones(2, device=device))
        kernels.sums_above(x, 0.5)
        kernels.above(x, 0.5)
        kernels.magnitude_counts(x, first_bit_pattern=0, shift=20, num_bins=1)
        kernels.largest(x, 1)
        indices, magnitudes, _ = kernels.collect(x, 0, 1, 18)
        kernels.keep(indices, magnitudes, 1, 1, 2, 0)
        kernels.distinct(places, 1)
        kernels.add_at_(x, places, kernels.gather(x, places))


@contextmanager
def _noted(*, loops: bool) -> Iterator[None]:
    """Say why the start takes long where loops are compiled for some time: on stderr, by one rank of a machine.

    numba says when it compiles. Triton does not before it has: of its kernels only the time tells.
    """
    words = "micro compiles its loops for some seconds: once on this machine"
    note = Timer(NOTE_S if loops else TRITON_NOTE_S, lambda: print(words, file=sys.stderr, flush=True))
    note.daemon = True
    begin = cache(note.start)  # a timer starts once
    try:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            yield
        elif loops:
            with kernels.module("jit").when_compiling(begin):
                yield
        else:
            begin()
            yield
    finally:
        note.cancel()
