"""Settings of parts, reducers and plans that make no sense are refused in one line: the key, and what was given."""

import math
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import micro
from experiments.planning.costs import Flat, Link
from experiments.planning.nodes import FlatOnNodes, seconds_of
from experiments.planning.schedules.base import Schedule
from experiments.planning.theory import top_k_error
from micro.density.base import Constant
from micro.drivers.loss_scale import check_scaler
from micro.predicted_traffic import calls_of, volume_of
from micro.reducers.scope import scoped
from micro.selectors.estimated import Fit
from micro.selectors.scaled_elements import ScaledElements
from micro.values.flat import MAX_NUMEL
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

NEEDED: dict[str, dict[str, Any]] = {  # what a part is not built without
    "estimated": {"fit": "dgc"},
    **{name: {"selector": "topk"} for name in ("per_tensor", "scaled_elements")},
    **{name: {"density": 0.1} for name in ("constant", "dct", "fft")},
    "warmup": {"density": 0.01, "start_density": 0.5, "steps": 5},
    "by_name": {"density": 0.1, "patterns": {"a": 0.2}},
    "quantized": {"codec": "int8"},
}
KINDS: dict[str, type[Any]] = {
    "selector": micro.Selector,
    "exchange": micro.Exchange,
    "codec": micro.Codec,
    "indices": micro.IndexCodec,
    "density": micro.Density,
    "reducer": micro.Reducer,
    "fit": Fit,
    "schedule": Schedule,
}
UNCHECKED = {"seed"}  # any number
AROUND = {"sparse", "split", "two_level"}  # reducers that are made of others
PARTS = [(kind, name) for kind, base in KINDS.items() for name in micro.known(base) if name not in AROUND]

BUILT: list[tuple[str, dict[str, Any], str, Any]] = [  # at the ends of a range, and settings that contradict each other
    ("selector", {"name": "topk2"}, "did you mean 'topk'", "topk2"),
    ("selector", {"name": "micro", "rul": "agreed"}, "did you mean 'rule'", "rul"),
    ("selector", {"name": "threshold", "value": 0.0}, "value", 0.0),
    ("selector", {"name": "exdyna", "tolerance": 1.0}, "tolerance", 1.0),
    ("selector", {"name": "estimated", "fit": "x"}, "dgc, dgc_published", "x"),
    ("density", {"name": "warmup", "density": 0.1, "start_density": 0.5, "steps": 5, "stages": 6}, "stages", 6),
    ("density", {"name": "by_name", "density": 0.1, "patterns": {}}, "patterns", {}),
    ("density", {"name": "by_name", "density": 0.1, "patterns": [0.1]}, "patterns", [0.1]),
    ("density", {"name": "by_name", "density": 0.1, "patterns": {"a": 2.0}}, "'a'", 2.0),
    ("exchange", {"name": "gather", "rule": "repaired"}, "rule of gather", "repaired"),
    ("exchange", {"name": "oktopk", "balance": 0.5}, "balance of oktopk", 0.5),
    ("exchange", {"name": "oktopk", "reevaluate": 5}, "reevaluate of oktopk", "rule=repaired"),
    ("codec", {"name": "int8", "block": 0}, "block of int8", 0),
    ("codec", {"name": "fp8", "block": 0}, "block of fp8", 0),
    ("codec", {"name": "range_float", "bits": 3}, "bits of range_float", 3),
    ("codec", {"name": "range_float", "mantissa": 8}, "mantissa of range_float", 8),
    ("reducer", {"name": "powersgd", "min_compression": 1.0}, "min_compression of powersgd", 1.0),
    ("reducer", {"name": "fft", "density": 0.1, "feedback": "momentum"}, "feedback of fft", "momentum"),
    ("reducer", {"name": "fft", "density": 0.1, "indices": "bitmapp"}, "did you mean 'bitmap'", "bitmapp"),
    ("reducer", {"name": "dct", "density": 0.1, "exchange": "union"}, "exchange of dct", "union"),
    (
        *("reducer", {"name": "dct", "density": 0.1, "codec": {"name": "qsgd", "rule": "published"}}),
        *("codec qsgd", "feedback=none"),
    ),
    ("reducer", {"name": "dct", "density": 0.1, "feedback": "momentum"}, "feedback of dct", "momentum"),
]

TOGETHER: list[tuple[str, dict[str, Any], str, str]] = [  # selector, other parts, what is named
    ("leader", {"exchange": "gather"}, "exchange gather", "use exchange union"),
    ("micro", {"exchange": "gtopk"}, "exchange gtopk", "whole vector"),
    ("randomk", {"exchange": "dsa"}, "exchange dsa", "same indices"),
    ("topk", {"exchange": "oktopk", "codec": "half"}, "exchange oktopk", "half"),
    ("topk", {"exchange": {"name": "gtopk", "rule": "published"}, "indices": "packed"}, "gtopk", "packed"),
    ("topk", {"codec": {"name": "qsgd", "rule": "published"}}, "codec qsgd", "feedback=none"),
    ("topk", {"indices": "bitmap", "density": 0.01}, "indices bitmap", "0.01"),
    ("topk", {"feedback": "momentum", "exchange": "gtopk"}, "feedback momentum", "exchange gtopk"),
    ("topk", {"feedback": "momentum", "exchange": "dsa", "codec": "half"}, "feedback momentum", "exchange dsa"),
    ("everything", {"density": 0.5}, "everything", "density=1"),
    ("threshold", {"density": None}, "density", "None"),
]

CALLS: list[tuple[Callable[[], object], str, Any]] = [
    *((lambda bad=bad: Constant(bad), "density must be in (0, 1]", bad) for bad in (0, -0.1, 1.1, math.nan, math.inf)),
    (lambda: micro.SparseReducer(MICRO, micro.ByName(patterns={"a": 0.2}, density=0.1)), "by_name", "micro"),
    (lambda: micro.ByName(patterns={"c*": 0.2}, density=0.1).check_parameters({"a": (1,)}), "'c*'", "'a'"),
    (lambda: micro.PerTensor(selector=Deft()), "selector", "deft"),
    *(
        (lambda each=each: micro.PerTensor(selector=each), f"selector {each}", "messages")
        for each in ("micro", "exdyna")
    ),
    (lambda: micro.PerTensor(selector=micro.TopK(scope="layer")), "selector", "topk"),
    (lambda: micro.PerTensor(selector=micro.PerTensor(selector=TOPK)), "selector", "per_tensor topk"),
    *(
        (lambda each=each: ScaledElements(selector=each), word, "weights each parameter")
        for each, word in (
            *((micro.TopK(scope="layer"), "topk"), (Deft(), "deft")),
            (ScaledElements(selector=MICRO), "scaled_elements"),
        )
    ),
    (lambda: ScaledElements(selector=micro.RandomK()), "randomk", "magnitude"),
    (lambda: ScaledElements(selector=micro.Estimated(fit="gaussiank")), "gaussiank", "distribution"),
    (lambda: ScaledElements(selector=MICRO, memory=-0.1), "memory", -0.1),
    (lambda: ScaledElements(selector=MICRO, eps=0.0), "eps", 0.0),
    (lambda: micro.ErrorFeedback(decay=0.0), "decay", 0.0),
    (lambda: micro.MomentumCorrection(momentum=1.0), "momentum of the feedback", 1.0),
    (lambda: micro.Layout(("a",), ((2**32, 2**32),)), f"numel of a layout must be in [1, {MAX_NUMEL}]", 2**64),
    # reducers around reducers
    (lambda: two_level(SPARSE, 0), "ranks_per_node", 0),
    (lambda: volume_of(two_level(SPARSE), 1000, 3), "ranks_per_node", "2 for 3 ranks"),
    (lambda: Flat(LINK, 0), "world_size", 0),
    (lambda: micro.MomentumCorrection(clip=0.0), "clip of the feedback", 0.0),
    (lambda: two_level(micro.PowerSGD(rank=2)), "two_level", "powersgd"),
    (lambda: two_level(split(micro.PowerSGD(rank=2))), "two_level", "split powersgd"),
    (lambda: two_level(MICRO), "reducer", "the selector Micro"),
    (lambda: two_level(split(two_level(SPARSE))), "two_level", "two_level split two_level"),
    (lambda: split(two_level(split(SPARSE))), "split", "split two_level split"),
    (lambda: split(two_level(micro.DenseReducer())), "split", "two_level dense"),
    (lambda: split(two_level(DGC)), "feedback", "momentum"),
    (lambda: micro.Simulation(two_level(SPARSE), LAYOUT, 3), "ranks_per_node", "2 for 3 ranks"),
    (lambda: check_scaler(2.0, SPARSE), "GradScaler", "float"),
    (lambda: check_scaler(lambda: 0.0, SPARSE), "scale of the loss", "0"),
    (lambda: check_scaler(lambda loss: 2.0, SPARSE), "without arguments", "loss"),
    (lambda: check_scaler(lambda: None, SPARSE), "number", "NoneType"),
    (lambda: check_scaler(SimpleNamespace(_scaler=2.0), SPARSE), "GradScaler", "SimpleNamespace"),
    (lambda: micro.SparseReducer(micro.RandomK(unbiased=True), 0.1), "unbiased", "feedback=none"),
    (lambda: check_scaler(SCALER, two_level(DGC)), "clip", "feedback momentum"),
    (lambda: check_scaler(SCALER, scoped(THRESHOLD, "bucket")), "selector", "threshold"),
    (lambda: scoped(two_level(SPARSE), "model"), "two_level", NOTHING),
    # what a plan is told
    (lambda: calls_of(two_level(SPARSE), 1000, 8), "two_level", NOTHING),
    (lambda: calls_of(split(SPARSE), 72, 2), "layout", NOTHING),
    (lambda: calls_of(SPARSE, 0, 2), "at least 1", "0 and 2"),
    (lambda: calls_of(SPARSE, 6, 2, layout=micro.Layout.flat(5)), "5 elements", 6),
    (lambda: calls_of(SPARSE, 6, 2, element_bytes=3), "element_bytes", 3),
    (lambda: Link(-1.0, 0.0), "alpha_s", -1.0),
    (lambda: Flat(LINK, 2, "rings"), "algorithm", "rings"),
    (lambda: nodes(2, 2, rails=3), "rails", 3),
    (lambda: seconds_of(TWO_LEVELS, Flat(LINK, 4)), "network of nodes", NOTHING),
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


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_every_setting_of_every_part_refuses_what_it_is_not(kind: str, name: str) -> None:
    whole = {"name": name, **NEEDED.get(name, {})}
    for field in fields(micro.build(KINDS[kind], whole)):
        for bad in (-1, "newest") if field.init and field.name not in UNCHECKED else ():
            refused(lambda: micro.build(KINDS[kind], whole | {field.name: bad}), field.name)  # noqa: B023


@pytest.mark.parametrize(("kind", "spec", "key", "given"), BUILT)
def test_a_setting_of_a_part_is_refused(kind: str, spec: dict[str, Any], key: str, given: Any) -> None:
    refused(lambda: micro.build(KINDS[kind], spec), key, given)


@pytest.mark.parametrize(("selector", "parts", "key", "given"), TOGETHER)
def test_parts_that_do_not_go_together_are_refused(selector: str, parts: dict[str, Any], key: str, given: str) -> None:
    kinds = KINDS | {"feedback": micro.Feedback}
    built = {kind: micro.build(kinds[kind], spec) if kind != "density" else spec for kind, spec in parts.items()}
    chosen = micro.build(micro.Selector, selector)
    refused(lambda: micro.SparseReducer(chosen, **{"density": 0.1, **built}), key, given)


@pytest.mark.parametrize(("call", "key", "given"), CALLS)
def test_what_makes_no_sense_is_refused(call: Callable[[], object], key: str, given: Any) -> None:
    refused(call, key, given)


@pytest.mark.parametrize(("settings", "key", "given"), SPLIT)
def test_parameters_that_cannot_be_split_are_refused(settings: dict[str, Any], key: str, given: Any) -> None:
    refused(lambda: micro.Split(**{"reducer": SPARSE, **settings}).check_parameters(SHAPES), key, given)
