"""Files of measurements and plans: what was saved comes back, and what is wrong is named in one line."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import micro
from experiments.planning.documents import BadFile, Document
from experiments.planning.schedules.base import Plan
from experiments.planning.tables import Curve, LinkTable, SelectTable
from experiments.planning.traces import Layer, Trace
from tests.refusals import refused

TRACE = Trace(
    model="net",
    layers=(Layer("head", 8, 0.5, 0.75), Layer("body", 400, 0.5, shape=(10, 10)), Layer("stem", 4, 2.0, 0.0)),
    forward_s=1.0,
    backward_s=2.25,
    update_s=0.125,
    batch_size=16,
)
CURVE = Curve(sizes=(0.0, 100.0, 1000.0), seconds=(1.0, 2.0, 20.0))
LINK = LinkTable(world_size=4, backend="gloo", link="loopback", collectives={"all_reduce": CURVE, "scatter": CURVE})
SELECT = SelectTable(world_size=4, density=0.01, device="cpu", methods={"topk": CURVE})
PLAN = Plan(schedule="exact", groups=(("head", "body"), ("stem",)), num_bytes=(408, 4), step_s=3.5)
ALL = (TRACE, LINK, SELECT, PLAN)


@pytest.mark.parametrize("kept", ALL, ids=lambda kept: kept.format)
def test_what_was_saved_comes_back_as_its_own_kind_alone(kept: Document, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    kept.save(path)
    assert type(kept).load(path) == kept
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    for other in ALL:
        if other is not kept:
            refused(lambda other=other: type(other).load(path), other.format, kept.format, error=BadFile)  # type: ignore[misc]


def test_fields_with_a_default_may_be_left_out_and_a_stored_fit_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "by_hand.json"
    layers = [{"name": "only", "num_bytes": 4, "ready_s": 0}]
    path.write_text(
        json.dumps({"format": "micro-trace-1", "model": "m", "layers": layers, "forward_s": 0, "backward_s": 0})
    )
    assert Trace.load(path) == Trace(model="m", layers=(Layer("only", 4, 0),), forward_s=0, backward_s=0)
    changed(LINK, "collectives.all_reduce.alpha_s", 99.0, path)
    assert LinkTable.load(path) == LINK


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe", b"[]"])
def test_what_is_no_such_file_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    refused(lambda: Trace.load(path), str(path), error=BadFile)


def test_a_trace_has_a_layout_where_all_shapes_are_known() -> None:
    assert TRACE.layout is None
    layers = tuple(replace(layer, shape=(layer.num_bytes // 4,)) for layer in TRACE.layers)
    assert replace(TRACE, layers=layers).layout == micro.Layout(("head", "body", "stem"), ((2,), (100,), (1,)))


def changed(kept: Document, place: str, value: Any, path: Path) -> None:
    """Write a file with the field at a dotted place set; a value of KeyError takes it away."""
    kept.save(path)
    whole: Any = json.loads(path.read_text())
    *way, last = [int(step) if step.isdigit() else step for step in place.split(".")]
    found = whole
    for step in way:
        found = found[step]
    if value is KeyError:
        del found[last]
    else:
        found[last] = value
    path.write_text(json.dumps(whole))


WRONG = [  # document, field, value, what the line names
    (TRACE, "layers", KeyError, "'layers' is missing"),
    (TRACE, "layers", [], "layers must be one or more"),
    (TRACE, "layers.1.colour", "red", "layers[1]: 'colour' is not a field"),
    (TRACE, "layers.1.name", "head", "a name of its own"),
    (TRACE, "layers.0.num_bytes", 401, "num_bytes of 'head' must be a multiple of 4, got 401"),
    (TRACE, "layers.1.shape", [7, 64], "elements of [7, 64]"),
    (TRACE, "layers.1.ready_s", math.nan, "layers[1].ready_s must be a number of at least 0, got nan"),
    (TRACE, "layers.1.ready_s", 0.25, "ready_s of 'body' must not be before 0.5, got 0.25"),
    (TRACE, "element_bytes", 0, "element_bytes must be at least 1, got 0"),
    (TRACE, "backward_s", 1.0, "backward_s must be at least the last ready_s 2.0, got 1.0"),
    (LINK, "world_size", 0, "world_size must be at least 1, got 0"),
    (LINK, "collectives", [1], "collectives must be a mapping"),
    (LINK, "collectives.scatter.sizes", [1, 2], "collectives.scatter: sizes and seconds"),
    (SELECT, "density", 0, "density must be in (0, 1], got 0"),
    (SELECT, "methods", {}, "methods is empty"),
    (PLAN, "num_bytes", [412], "num_bytes of a plan"),
    (LINK, "collectives.all_reduce", KeyError, "collectives must be among all_reduce"),
    (LINK, "collectives.scatter.sizes", [1, 3, 3], "collectives.scatter: sizes must rise, got 3 after 3"),
    (PLAN, "groups.0.0", "stem", "groups of a plan"),
]


@pytest.mark.parametrize(("kept", "place", "value", "words"), WRONG, ids=[f"{row[1]}={row[2]}" for row in WRONG])
def test_a_wrong_field_is_named(kept: Document, place: str, value: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    changed(kept, place, value, path)
    assert refused(lambda: type(kept).load(path), words, error=BadFile).startswith(f"{path}: ")


# --- curves -----------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_in_straight_lines_and_is_never_below_zero() -> None:
    assert [CURVE.at(size) for size in (0, 25, 100, 550, 1000, 2000)] == pytest.approx([1, 1.25, 2, 11, 20, 40])
    assert Curve(sizes=(100, 200), seconds=(1.0, 3.0)).at(10) == 0.0


def test_no_other_line_has_smaller_relative_errors_and_a_line_is_fitted_exactly() -> None:
    rng = random.Random(0)
    sizes = tuple(sorted(rng.uniform(1, 1000) for _ in range(8)))
    curve = Curve(sizes=sizes, seconds=tuple((2 + 0.05 * size) * rng.uniform(0.8, 1.2) for size in sizes))

    def errors(alpha: float, beta: float) -> list[float]:
        return [abs(alpha + beta * x - y) / y for x, y in zip(curve.sizes, curve.seconds, strict=True)]

    best = errors(curve.alpha_s, curve.beta_s)
    assert curve.error == pytest.approx(max(best))
    for _ in range(500):
        other = errors(curve.alpha_s * rng.uniform(0.5, 1.5), curve.beta_s * rng.uniform(0.5, 1.5))
        assert sum(e**2 for e in best) <= sum(e**2 for e in other) * (1 + 1e-9)
    for alpha_s, beta_s in ((1e-3, 2e-9), (0.0, 1e-6), (5.0, 0.0)):
        line = Curve(sizes=sizes, seconds=tuple(alpha_s + beta_s * size for size in sizes))
        assert (line.alpha_s, line.beta_s) == pytest.approx((alpha_s, beta_s), rel=1e-6, abs=1e-12)


def test_a_fit_starts_no_lower_than_zero_and_does_not_fall() -> None:
    convex = Curve(sizes=(10, 100, 1000), seconds=(0.01, 2.0, 400.0))
    assert convex.alpha_s == 0.0 < convex.beta_s
    falling = Curve(sizes=(10, 100), seconds=(2.0, 1.0))
    assert falling.beta_s == 0.0
    assert 1.0 <= falling.alpha_s <= 2.0


def test_what_was_not_measured_is_refused_by_name() -> None:
    refused(lambda: LINK.seconds("broadcast", 10), "all_reduce, scatter", "broadcast")
    refused(lambda: SELECT.seconds("dgc", 10), "topk", "dgc")
    assert LINK.seconds("scatter", 100) == SELECT.seconds("topk", 100) == pytest.approx(2.0)
