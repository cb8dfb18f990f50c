"""Ranks that reach a compiled loop for the first time together: one compiles it, the others take it from the disk."""

import fcntl
from pathlib import Path

import pytest

from tests.dist.processes import ranks

numba = pytest.importorskip("numba")

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


def doubled(number: int) -> int:
    return 2 * number


def compile_in(folder: str) -> int:
    """Return how often this process compiled the loop itself."""
    from micro.kernels import jit

    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, folder
    try:
        loop = jit.jitted(doubled)
        assert loop(21) == 42
    finally:
        numba.config.CACHE_DIR = before
    return sum(loop.stats.cache_misses.values())


def test_one_rank_of_a_node_compiles_a_loop(tmp_path: Path) -> None:
    assert sorted(ranks(3).run(compile_in, str(tmp_path))) == [0, 0, 1]


def test_a_process_that_stands_still_while_it_compiles_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from micro.kernels import compiling

    monkeypatch.setattr(compiling, "LONGEST_S", 0.1)
    assert compile_in(str(tmp_path)) == 1
    (lock,) = tmp_path.rglob("*.lock")
    for kept in tmp_path.rglob("*.nb?"):
        kept.unlink()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert compile_in(str(tmp_path)) == 1
