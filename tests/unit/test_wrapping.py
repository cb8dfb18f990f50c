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


@pytest.mark.parametrize(
    ("reducer", "method", "full_name"),
    [
        (split(MICRO), "split micro (agreed)", "split sparse"),
        (two_level(MICRO), "two_level 2 micro (agreed)", "two_level sparse"),
        (split(two_level(MICRO)), "split two_level 2 micro (agreed)", "split two_level sparse"),
        (two_level(split(MICRO)), "two_level 2 split micro (agreed)", "two_level split sparse"),
    ],
)
def test_names_begin_with_the_outer_reducer(reducer: micro.Reducer, method: str, full_name: str) -> None:
    assert reducer.method == method
    assert reducer.full_name == full_name
    assert reducer.rule_name == "agreed"
    assert innermost(reducer) is MICRO
    assert [layer.name for layer in layers(reducer)] == full_name.split()


def test_what_to_do_about_nan_reaches_the_innermost_reducer() -> None:
    both = micro.TwoLevel(reducer=split(MICRO), ranks_per_node=2, nonfinite="skip")
    assert both.policy == "skip"
    assert innermost(both).policy == "skip"
    assert two_level(both.reducer).policy == "skip"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: split(split(MICRO)), "split can be around a reducer once, got split split sparse: leave one"),
        (lambda: two_level(two_level(MICRO)), "two_level can be around a reducer once, got two_level two_level sparse"),
        (lambda: split(two_level(split(MICRO))), "split can be around a reducer once, got split two_level split"),
        (lambda: two_level(split(two_level(MICRO))), "two_level can be around a reducer once, got two_level split two"),
        (lambda: split(two_level(micro.DenseReducer())), "split needs a reducer that sparsifies, got two_level dense"),
        (lambda: split(two_level(DGC)), "feedback momentum holds the optimizer's momentum"),
        (lambda: micro.TwoLevel(reducer=MICRO, ranks_per_node=2, nonfinite="go"), "must be one of stop, skip"),  # type: ignore[arg-type]
        (lambda: check_scaler(torch.amp.GradScaler("cpu"), two_level(DGC)), "clip of feedback momentum is in units"),
        (lambda: check_scaler(torch.amp.GradScaler("cpu"), scoped(THRESHOLD, "bucket")), "selector threshold has its"),
        (lambda: check_scaler(torch.amp.GradScaler("cpu"), scoped(THRESHOLD, "tensor")), "selector threshold has its"),
        (lambda: scoped(micro.SparseReducer(micro.Micro(slack=0.1), 0.1), "model"), "scope=model sends"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
