"""Settings of parts, reducers and plans that make no sense are refused in one line: the key, and what was given."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import micro
from micro.density.constant import Constant
from micro.drivers.loss_scale import check_scaler
from micro.exchanges.in_pieces import InPieces
from micro.flat import MAX_NUMEL
from micro.planning.costs import Flat, Link
from micro.planning.nodes import FlatOnNodes, seconds_of
from micro.planning.schedules.base import Schedule
from micro.planning.theory import top_k_error
from micro.planning.volumes import calls_of, volume_of
from micro.scope import scoped
from micro.selectors.scaled import Scaled
from micro.selectors.scaled_elements import ScaledElements
from micro.zoo.deft import Deft
from tests.refusals import NOTHING, refused

MICRO, LEADER, TOPK = micro.Micro(), micro.Leader(), micro.TopK()
SPARSE, THRESHOLD = micro.SparseReducer(TOPK, 0.1), micro.SparseReducer(micro.Threshold(), 0.1)
DGC = micro.SparseReducer(micro.Estimated(fit="dgc"), 0.1, feedback=micro.MomentumCorrection(clip=1.0))
LAYOUT = micro.Layout(("a", "b"), ((8, 8), (8,)))
SHAPES = {"body.weight": (6, 8), "body.bias": (6,), "norm.weight": (6,), "head.weight": (4, 6), "head.bias": (4,)}
SCALER = torch.amp.GradScaler("cpu")
LINK = Link(2e-6, 1e-11)


def split(reducer: micro.Reducer) -> micro.Split:
    return micro.Split(reducer=reducer, min_dims=2)


def two_level(reducer: micro.Reducer, ranks_per_node: int = 2) -> micro.TwoLevel:
    return micro.TwoLevel(reducer=reducer, ranks_per_node=ranks_per_node)


def nodes(local: int, num_nodes: int, rails: int = 1) -> FlatOnNodes:
    return FlatOnNodes(intra=LINK, inter=LINK, ranks_per_node=local, num_nodes=num_nodes, rails=rails)


TWO_LEVELS = volume_of(two_level(micro.DenseReducer()), 100, 4)

BUILT: list[tuple[type[Any], dict[str, Any], str, Any]] = [
    (micro.Selector, {"name": "topk2"}, "did you mean 'topk'", "topk2"),
    (micro.Selector, {"name": "micro", "rul": "agreed"}, "did you mean 'rule'", "rul"),
    (micro.Selector, {"name": "micro", "rule": "best"}, "rule", "best"),
    (micro.Selector, {"name": "micro", "slack": 1.0}, "slack", 1.0),
    (micro.Selector, {"name": "micro", "block": 0}, "block", 0),
    (micro.Selector, {"name": "micro", "block": 8, "rule": "published"}, "block", "rule=published"),
    (micro.Selector, {"name": "topk", "scope": "tensor"}, "scope", "tensor"),
    (micro.Selector, {"name": "threshold", "value": 0.0}, "value", 0.0),
    (micro.Selector, {"name": "deft", "rule": "agreed"}, "rule", "agreed"),
    (micro.Selector, {"name": "exdyna", "num_blocks": 0}, "num_blocks", 0),
    (micro.Selector, {"name": "exdyna", "tolerance": 1.0}, "tolerance", 1.0),
    (micro.Selector, {"name": "exdyna", "smallest_share": -0.1}, "smallest_share", -0.1),
    (micro.Selector, {"name": "estimated", "fit": "x"}, "dgc, dgc_published", "x"),
    (micro.Selector, {"name": "estimated", "fit": {"name": "sidco", "law": "normal"}}, "law", "normal"),
    (micro.Selector, {"name": "estimated", "fit": {"name": "sidco", "stages": 0}}, "stages", 0),
    (micro.Selector, {"name": "estimated", "fit": {"name": "reused_published", "reevaluate": 0}}, "reevaluate", 0),
    (micro.Density, {"name": "accordion", "density": 0.1, "high": 0.05, "interval": 2}, "high", 0.05),
    (micro.Density, {"name": "accordion", "density": 0.1, "high": 0.5, "interval": 0}, "interval", 0),
    (micro.Density, {"name": "accordion", "density": 0.1, "high": 0.5, "interval": 2, "change": 0.0}, "change", 0.0),
    (micro.Density, {"name": "warmup", "density": 0.01, "start_density": 0.5, "steps": 0}, "steps", 0),
    (micro.Density, {"name": "warmup", "density": 0.1, "start_density": 0.5, "steps": 5, "stages": 6}, "stages", 6),
    (micro.Density, {"name": "by_name", "density": 0.1, "patterns": {}}, "patterns", {}),
    (micro.Density, {"name": "by_name", "density": 0.1, "patterns": [0.1]}, "patterns", [0.1]),
    (micro.Density, {"name": "by_name", "density": 0.1, "patterns": {"a": 2.0}}, "'a'", 2.0),
    (Schedule, {"name": "capped", "cap_mb": 0}, "cap_mb", 0),
    (Schedule, {"name": "dear", "cap_mb": -1.0}, "cap_mb", -1.0),
    (Schedule, {"name": "omgs", "rule": "new"}, "rule of omgs", "new"),
    (Schedule, {"name": "mgwfb"}, "did you mean 'mgwfbp'", "mgwfb"),
]

CALLS: list[tuple[Callable[[], object], str, Any]] = [
    *((lambda bad=bad: Constant(bad), "density must be in (0, 1]", bad) for bad in (0, -0.1, 1.1, math.nan, math.inf)),
    (lambda: micro.WarmUp(density=0.5, start_density=1.1, steps=3), "start_density of the warm-up", 1.1),
    (lambda: micro.SparseReducer(TOPK, None), "density", None),
    (lambda: micro.SparseReducer(MICRO, micro.ByName(patterns={"a": 0.2}, density=0.1)), "by_name", "micro"),
    (lambda: micro.ByName(patterns={"c*": 0.2}, density=0.1).check_parameters({"a": (1,)}), "'c*'", "'a'"),
    (lambda: micro.PerTensor(selector=micro.Micro(slack=0.2)), "one message for each parameter", NOTHING),
    (lambda: micro.PerTensor(selector=Deft()), "selector", "deft"),
    (lambda: micro.PerTensor(selector=micro.Everything()), "selector", "everything"),
    (lambda: micro.PerTensor(selector=micro.TopK(scope="layer")), "selector", "topk"),
    (lambda: micro.PerTensor(selector=micro.PerTensor(selector=TOPK)), "selector", "per_tensor topk"),
    (lambda: micro.SparseReducer(micro.Micro(slack=0.2), 0.1, exchange=micro.DSA()), "slack", "exchange dsa"),
    *(
        (lambda each=each, scaling=scaling: scaling(selector=each), word, "weighs each parameter")
        for scaling in (Scaled, ScaledElements)
        for each, word in ((micro.TopK(scope="layer"), "topk"), (Deft(), "deft"), (Scaled(selector=MICRO), "scaled"))
    ),
    (lambda: Scaled(selector=micro.RandomK()), "randomk", "magnitudes"),
    (lambda: ScaledElements(selector=micro.Estimated(fit="gaussiank")), "gaussiank", "law"),
    (lambda: Scaled(selector=MICRO, memory=1.0), "memory", 1.0),
    (lambda: ScaledElements(selector=MICRO, memory=-0.1), "memory", -0.1),
    (lambda: ScaledElements(selector=MICRO, eps=0.0), "eps", 0.0),
    (lambda: InPieces(ends=(3, 8)).pieces(7, 4), "ends of in_pieces", 8),
    (lambda: micro.ErrorFeedback(decay=0.0), "decay", 0.0),
    (lambda: micro.ErrorFeedback(decay=1.1), "decay", 1.1),
    (lambda: micro.MomentumCorrection(momentum=1.0), "momentum of the feedback", 1.0),
    (lambda: micro.MomentumCorrection(momentum=math.nan), "momentum of the feedback", math.nan),
    (lambda: micro.MomentumCorrection(clip=0.0), "clip of the feedback", 0.0),
    (lambda: micro.SparseReducer(micro.Everything(), 1.0, feedback=micro.EF21()), "feedback", "ef21"),
    (lambda: micro.Layout(("a",), ((2**32, 2**32),)), f"numel of a layout must be in [1, {MAX_NUMEL}]", 2**64),
    # reducers around reducers
    (lambda: two_level(SPARSE, 0), "ranks_per_node", 0),
    (lambda: two_level(micro.PowerSGD(rank=2)), "two_level", "powersgd"),
    (lambda: two_level(split(micro.PowerSGD(rank=2))), "two_level", "split powersgd"),
    (lambda: two_level(MICRO), "reducer", "the selector Micro"),
    (lambda: two_level(split(two_level(SPARSE))), "two_level", "two_level split two_level"),
    (lambda: split(two_level(split(SPARSE))), "split", "split two_level split"),
    (lambda: split(two_level(micro.DenseReducer())), "split", "two_level dense"),
    (lambda: split(two_level(DGC)), "feedback", "momentum"),
    (lambda: micro.Simulation(two_level(SPARSE), LAYOUT, 3), "ranks_per_node", "2 for 3 ranks"),
    (lambda: micro.Simulation(split(two_level(SPARSE)), LAYOUT, 3), "ranks_per_node", "2 for 3 ranks"),
    (lambda: volume_of(two_level(SPARSE), 1000, 3), "ranks_per_node", "2 for 3 ranks"),
    (lambda: check_scaler(SCALER, two_level(DGC)), "clip", "feedback momentum"),
    (lambda: check_scaler(SCALER, scoped(THRESHOLD, "bucket")), "selector", "threshold"),
    (lambda: check_scaler(SCALER, scoped(THRESHOLD, "tensor")), "selector", "threshold"),
    (lambda: scoped(micro.SparseReducer(micro.Micro(slack=0.1), 0.1), "model"), "scope=model", NOTHING),
    (lambda: scoped(two_level(SPARSE), "model"), "two_level", NOTHING),
    # what a plan is told
    (lambda: calls_of(two_level(SPARSE), 1000, 8), "two_level", NOTHING),
    (lambda: calls_of(split(SPARSE), 72, 2), "layout", NOTHING),
    (lambda: calls_of(micro.PowerSGD(rank=2), 100, 4), "layout", NOTHING),
    (lambda: calls_of(SPARSE, 0, 2), "at least 1", "0 and 2"),
    (lambda: calls_of(SPARSE, 6, 2, layout=micro.Layout.flat(5)), "5 elements", 6),
    (lambda: calls_of(SPARSE, 6, 2, element_bytes=3), "element_bytes", 3),
    (lambda: Link(-1.0, 0.0), "alpha_s", -1.0),
    (lambda: Flat(LINK, 0), "world_size", 0),
    (lambda: Flat(LINK, 2, "rings"), "algorithm", "rings"),
    (lambda: nodes(2, 2, rails=3), "rails", 3),
    (lambda: nodes(2, 0), "world_size", 0),
    (lambda: seconds_of(TWO_LEVELS, Flat(LINK, 4)), "two speeds", NOTHING),
    (lambda: seconds_of(TWO_LEVELS, nodes(4, 1)), "2 ranks per node", 4),
    (lambda: top_k_error(torch.zeros(3), torch.ones(1)), "zeros", NOTHING),
    (lambda: top_k_error(torch.ones(3), torch.tensor([1.5])), "shares", [1.5]),
]

SPLIT: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "start_step", NOTHING),
    ({"dense": 3}, "dense", 3),
    ({"only": ("",)}, "only", ""),
    ({"start_step": -1}, "start_step", -1),
    ({"reducer": micro.DenseReducer(), "min_dims": 2}, "reducer", "dense"),
    ({"reducer": "micro", "min_dims": 2}, "reducer", "micro"),
    ({"reducer": DGC, "start_step": 2}, "momentum", NOTHING),
    ({"dense": ("*.bais",)}, "dense", "*.bais"),
    ({"only": ("*.weight", "x")}, "only", "x"),
    ({"dense": ("head*",), "only": ("*.weight",)}, "dense and only", "head.weight"),
    ({"dense": ("*",)}, "no parameter to sparsify", NOTHING),
    ({"only": ("*.bias",), "min_dims": 2}, "no parameter to sparsify", NOTHING),
]


@pytest.mark.parametrize(("kind", "spec", "key", "given"), BUILT)
def test_a_setting_of_a_part_is_refused(kind: type[Any], spec: dict[str, Any], key: str, given: Any) -> None:
    refused(lambda: micro.build(kind, spec), key, given)


@pytest.mark.parametrize(("call", "key", "given"), CALLS)
def test_what_makes_no_sense_is_refused(call: Callable[[], object], key: str, given: Any) -> None:
    refused(call, key, given)


@pytest.mark.parametrize(("settings", "key", "given"), SPLIT)
def test_parameters_that_cannot_be_split_are_refused(settings: dict[str, Any], key: str, given: Any) -> None:
    refused(lambda: micro.Split(**{"reducer": SPARSE, **settings}).check_parameters(SHAPES), key, given)
