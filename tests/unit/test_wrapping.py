"""Reducers around reducers: their names, which orders there are, and which are refused."""

from collections.abc import Callable

import pytest
import torch

import micro
from micro.drivers.loss_scale import check_scaler
from micro.reducers.wrapping import innermost, layers
from micro.scope import scoped

MICRO = micro.SparseReducer(micro.Micro(), density=0.1)
THRESHOLD = micro.SparseReducer(micro.Threshold(), density=0.1)
DGC = micro.SparseReducer(micro.Estimated(fit="dgc"), density=0.1, feedback=micro.MomentumCorrection(clip=1.0))


def split(reducer: micro.Reducer) -> micro.Split:
    return micro.Split(reducer=reducer, min_dims=2)


def two_level(reducer: micro.Reducer) -> micro.TwoLevel:
    return micro.TwoLevel(reducer=reducer, ranks_per_node=2)


def test_names_begin_with_the_outer_reducer() -> None:
    reducer = split(two_level(MICRO))
    assert reducer.method == "split two_level 2 micro (agreed)"
    assert [layer.name for layer in layers(reducer)] == reducer.full_name.split() == ["split", "two_level", "sparse"]
    assert reducer.rule_name == "agreed"
    assert innermost(reducer) is MICRO


def test_what_to_do_about_nan_reaches_the_innermost_reducer() -> None:
    both = micro.TwoLevel(reducer=split(MICRO), ranks_per_node=2, nonfinite="skip")
    assert both.policy == "skip"
    assert innermost(both).policy == "skip"
    assert two_level(both.reducer).policy == "skip"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: split(two_level(split(MICRO))), "split .* got split two_level split"),
        (lambda: two_level(split(two_level(MICRO))), "two_level .* got two_level split two_level"),
        (lambda: split(two_level(micro.DenseReducer())), "got two_level dense"),
        (lambda: split(two_level(DGC)), "feedback momentum"),
        (lambda: check_scaler(torch.amp.GradScaler("cpu"), two_level(DGC)), "clip of feedback momentum"),
        (lambda: check_scaler(torch.amp.GradScaler("cpu"), scoped(THRESHOLD, "bucket")), "selector threshold"),
        (lambda: check_scaler(torch.amp.GradScaler("cpu"), scoped(THRESHOLD, "tensor")), "selector threshold"),
        (lambda: scoped(micro.SparseReducer(micro.Micro(slack=0.1), 0.1), "model"), "scope=model"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
