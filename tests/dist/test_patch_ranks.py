"""Patches over a process group: every rank has the new weights afterwards, or an error and the old ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from micro import patches
from tests.dist.on_ranks import on_ranks, the_same
from tests.refusals import refused

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


def versions() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    old = {"a": torch.randn(40, 5).bfloat16(), "b": torch.randn(7)}
    return old, {"a": old["a"] * 1.01, "b": old["b"].clone()}


@pytest.mark.parametrize("source", [0, 1])
@on_ranks(2)
def test_all_ranks_get_the_weights_of_one(source: int) -> None:
    """The rank that sends has them already; the next patch follows on the first."""
    weights, new = versions()
    is_source = dist.get_rank() == source
    for patch in (patches.diff(weights, new), patches.diff(new, weights)):
        sent = patches.broadcast_(None if is_source else weights, patch if is_source else None, source=source)
        assert sent == patch
        assert is_source or patches.digest(weights) == patch.result
    group = dist.new_group([0, 1])
    patch = patches.diff(weights, new)
    patches.broadcast_(weights, patch if is_source else None, group=group, source=source)
    the_same(patches.digest(weights))


@on_ranks(2)
def test_where_one_rank_refuses_no_rank_has_changed() -> None:
    old, new = versions()
    is_first, patch = dist.get_rank() == 0, patches.diff(old, new)
    stale = {"a": old["a"].clone(), "b": old["b"] + 1}
    for weights in (new, stale, {"a": old["a"]}):
        own = old if is_first else weights
        before = patches.digest(own)
        words = refused(lambda own=own: patches.broadcast_(own, patch if is_first else None), "patch")  # type: ignore[misc]
        assert not is_first or "rank 1 refused micro.patches.broadcast_" in words
        assert patches.digest(own) == before
    patches.broadcast_(old, patch if is_first else None)
    assert the_same(patches.digest(old)) == patch.result


def arguments(rank: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Return calls, one of which does not fit, and a key word of the error."""
    old, new = versions()
    patch = patches.diff(old, new) if rank == 0 else None
    return {
        "two patches": ({"patch": patches.diff(old, new)}, "alone"),
        "no patch": ({"patch": None}, "alone"),
        "another rank": ({"patch": patch, "source": 2}, "[0, 2)"),
        "other ranks": ({"patch": patches.diff(old, new), "source": rank}, "source"),
        "no tensor": ({"patch": patch, "weights": {"a": 1} if rank else old}, "'a'"),
        "a list": ({"patch": patch, "weights": [1] if rank else old}, "list"),
    }


@pytest.mark.parametrize("name", arguments(0))
@on_ranks(2)
def test_arguments_that_do_not_fit_are_refused_on_all_ranks(name: str) -> None:
    old, _ = versions()
    given, word = arguments(dist.get_rank())[name]
    call: Callable[..., object] = patches.broadcast_
    refused(lambda: call(**{"weights": old} | given), word)
    assert patches.digest(old) == patches.digest(versions()[0])
