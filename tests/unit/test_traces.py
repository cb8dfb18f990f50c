"""The files of measurements and plans: what was saved comes back, and what is wrong is named in one line."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from micro.planning.documents import BadFile, Document
from micro.planning.schedules.base import Plan
from micro.planning.tables import Curve, LinkTable, SelectTable
from micro.planning.traces import Layer, Trace

TRACE = Trace(
    model="net",
    layers=(Layer("head", 8, 0.5, 0.75), Layer("body", 400, 0.5), Layer("stem", 4, 2.0, 0.0)),
    forward_s=1.0,
    backward_s=2.25,
    update_s=0.125,
    batch_size=16,
    world_size=4,
    device="cpu",
    num_steps=20,
)
CURVE = Curve(sizes=(0.0, 100.0, 1000.0), seconds=(1.0, 2.0, 20.0))
LINK = LinkTable(world_size=4, backend="gloo", link="loopback", collectives={"all_reduce": CURVE, "scatter": CURVE})
SELECT = SelectTable(world_size=4, density=0.01, device="cpu", methods={"topk": CURVE})
PLAN = Plan(schedule="exact", groups=(("head", "body"), ("stem",)), num_bytes=(408, 4), step_s=3.5)
ALL = (TRACE, LINK, SELECT, PLAN)


def as_json(kept: Document, path: Path) -> dict[str, Any]:
    kept.save(path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def change(found: Any, place: str, value: Any) -> None:
    """Set the field at a dotted place; a value of KeyError takes it away."""
    *way, last = [int(step) if step.isdigit() else step for step in place.split(".")]
    for step in way:
        found = found[step]
    if value is KeyError:
        del found[last]
    else:
        found[last] = value


# --- what was saved comes back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ALL, ids=lambda kept: kept.format)
def test_what_was_saved_comes_back(kept: Document, tmp_path: Path) -> None:
    kept.save(tmp_path / "file.json")
    assert type(kept).load(tmp_path / "file.json") == kept
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize("kept", ALL, ids=lambda kept: kept.format)
def test_no_file_passes_for_one_of_another_kind(kept: Document, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    kept.save(path)
    for other in ALL:
        if other is not kept:
            with pytest.raises(BadFile, match=f"{path}: format must be '{other.format}', got '{kept.format}'"):
                type(other).load(path)


def test_optional_fields_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "by_hand.json"
    layers = [{"name": "only", "num_bytes": 4, "ready_s": 0}]
    path.write_text(
        json.dumps({"format": "micro-trace-1", "model": "m", "layers": layers, "forward_s": 0, "backward_s": 0})
    )
    assert Trace.load(path) == Trace(model="m", layers=(Layer("only", 4, 0),), forward_s=0, backward_s=0)


def test_sums_of_a_trace() -> None:
    assert (TRACE.num_bytes, TRACE.numel, TRACE.compute_s) == (412, 103, 3.375)


# --- what is wrong is named -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [type(kept) for kept in ALL], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("content", [None, "", "{", "format: micro", b"\xff\xfe", "[]", "3", "null", '"text"', "{}"])
def test_what_is_no_such_file_is_refused(kind: type[Document], content: str | bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadFile) as caught:
        kind.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


WRONG = [
    (TRACE, "model", KeyError, "'model' is missing"),
    (TRACE, "layers", KeyError, "'layers' is missing"),
    (TRACE, "layers", [], "layers is empty"),
    (TRACE, "layers", {}, "layers must be a list, got dict"),
    (TRACE, "layers", None, "layers must be a list, got NoneType"),
    (TRACE, "layers.1", 7, "layers[1]: must be a mapping, got int"),
    (TRACE, "layers.1.num_bytes", KeyError, "layers[1]: 'num_bytes' is missing"),
    (TRACE, "layers.1.colour", "red", "layers[1]: 'colour' is not a field"),
    (TRACE, "layers.1.name", "head", "layers[1] ('head'): name must be a text that no other layer has"),
    (TRACE, "layers.1.name", ["body"], "name must be a text"),
    (TRACE, "layers.1.num_bytes", -400, "layers[1] ('body'): num_bytes must be a whole number of at least 1, got -400"),
    (TRACE, "layers.1.num_bytes", 0, "num_bytes must be a whole number of at least 1, got 0"),
    (TRACE, "layers.1.num_bytes", 400.0, "num_bytes must be a whole number of at least 1, got 400.0"),
    (TRACE, "layers.1.num_bytes", "400", "num_bytes must be a whole number of at least 1, got '400'"),
    (TRACE, "layers.1.num_bytes", 401, "layers[1] ('body'): num_bytes must be a multiple of 4, got 401"),
    (TRACE, "layers.1.ready_s", math.nan, "layers[1] ('body'): ready_s must be a number of at least 0, got nan"),
    (TRACE, "layers.1.ready_s", True, "ready_s must be a number of at least 0, got True"),
    (TRACE, "layers.1.ready_s", 0.25, "layers[1] ('body'): ready_s must not fall from layer to layer, got 0.25"),
    (TRACE, "layers.0.used_s", -1, "layers[0] ('head'): used_s must be a number of at least 0, got -1"),
    (TRACE, "forward_s", math.inf, "forward_s must be a number of at least 0, got inf"),
    (TRACE, "update_s", None, "update_s must be a number of at least 0, got None"),
    (TRACE, "backward_s", 1.0, "backward_s must be at least the last ready_s 2.0, got 1.0"),
    (TRACE, "element_bytes", 0, "element_bytes must be a whole number of at least 1, got 0"),
    (TRACE, "num_steps", "many", "num_steps must be a whole number of at least 1, got 'many'"),
    (TRACE, "world_size", True, "world_size must be a whole number of at least 1, got True"),
    (TRACE, "speed", 3, "'speed' is not a field"),
    (LINK, "world_size", 0, "world_size must be a whole number of at least 1, got 0"),
    (LINK, "collectives", KeyError, "'collectives' is missing"),
    (LINK, "collectives", [1], "collectives must be a mapping, got list"),
    (LINK, "collectives.all_reduce", KeyError, "collectives has no all_reduce, which every plan needs"),
    (LINK, "collectives.all_to_all", {"sizes": [1, 2], "seconds": [1, 2]}, "collectives must be of all_reduce"),
    (LINK, "collectives.scatter", 3, "collectives.scatter: must be a mapping, got int"),
    (LINK, "collectives.scatter.sizes", KeyError, "collectives.scatter: 'sizes' is missing"),
    (LINK, "collectives.scatter.sizes", 3, "collectives.scatter: sizes must be a list, got int"),
    (LINK, "collectives.scatter.sizes", [1, 2], "sizes and seconds must be two or more each, got 2 and 3"),
    (LINK, "collectives.scatter.sizes", [1, 3, 3], "collectives.scatter: sizes must rise, got 3 after 3"),
    (LINK, "collectives.scatter.sizes.0", -1, "collectives.scatter: sizes[0] must be a number of at least 0, got -1"),
    (LINK, "collectives.scatter.seconds.1", math.nan, "seconds[1] must be a number of at least 0, got nan"),
    (LINK, "collectives.scatter.seconds.1", "2", "seconds[1] must be a number of at least 0, got '2'"),
    (LINK, "collectives.scatter.median", [1], "collectives.scatter: 'median' is not a field"),
    (SELECT, "density", 0, "density must be in (0, 1], got 0"),
    (SELECT, "density", math.nan, "density must be in (0, 1], got nan"),
    (SELECT, "density", "low", "density must be in (0, 1], got low"),
    (SELECT, "methods", {}, "methods is empty"),
    (SELECT, "methods.topk.sizes", [], "methods.topk: sizes and seconds must be two or more each"),
    (SELECT, "methods.topk.seconds.2", -0.5, "methods.topk: seconds[2] must be a number of at least 0, got -0.5"),
    (PLAN, "schedule", KeyError, "'schedule' is missing"),
    (PLAN, "schedule", 3, "schedule and groups of a plan must be made of names"),
    (PLAN, "groups", "ab", "groups must be a list of lists of names"),
    (PLAN, "groups.0", "head", "groups must be a list of lists of names"),
    (PLAN, "groups.0.0", ["head"], "schedule and groups of a plan must be made of names"),
    (PLAN, "groups.0.0", "stem", "groups of a plan must hold each parameter once"),
    (PLAN, "groups", [], "groups of a plan must hold each parameter once"),
    (PLAN, "groups.1", [], "none may be empty"),
    (PLAN, "num_bytes", 412, "num_bytes must be a list, got int"),
    (PLAN, "num_bytes", [412], "num_bytes of a plan must be positive, one per group, got (412,)"),
    (PLAN, "num_bytes.1", -4, "num_bytes of a plan must be positive, one per group, got (408, -4)"),
    (PLAN, "num_bytes.1", 4.5, "num_bytes of a plan must be positive, one per group, got (408, 4.5)"),
    (PLAN, "step_s", math.nan, "step_s of a plan must be a number of at least 0, got nan"),
    (PLAN, "step_s", "fast", "step_s of a plan must be a number of at least 0, got 'fast'"),
    (PLAN, "digest", "abc", "'digest' is not a field"),
]


@pytest.mark.parametrize(("kept", "place", "value", "message"), WRONG, ids=[f"{row[1]}={row[2]}" for row in WRONG])
def test_a_wrong_field_is_named(kept: Document, place: str, value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    found = as_json(kept, path)
    change(found, place, value)
    path.write_text(json.dumps(found))
    with pytest.raises(BadFile) as caught:
        type(kept).load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- curves -----------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_in_straight_lines() -> None:
    assert [CURVE.at(size) for size in CURVE.sizes] == pytest.approx(CURVE.seconds)
    assert CURVE.at(25) == pytest.approx(1.25)
    assert CURVE.at(550) == pytest.approx(11.0)
    assert CURVE.at(2000) == pytest.approx(40.0)


def test_a_curve_is_never_below_zero() -> None:
    assert Curve(sizes=(100, 200), seconds=(1.0, 3.0)).at(10) == 0.0


@pytest.mark.parametrize(("alpha_s", "beta_s"), [(1e-3, 2e-9), (0.0, 1e-6), (5.0, 0.0)])
def test_a_line_is_fitted_exactly(alpha_s: float, beta_s: float) -> None:
    sizes = tuple(4.0**power for power in range(1, 13))
    curve = Curve(sizes=sizes, seconds=tuple(alpha_s + beta_s * size for size in sizes))
    assert (curve.alpha_s, curve.beta_s) == pytest.approx((alpha_s, beta_s), rel=1e-6, abs=1e-15)
    assert curve.error == pytest.approx(0.0, abs=1e-6)


def test_no_other_line_has_smaller_relative_errors() -> None:
    rng = random.Random(0)
    sizes = tuple(sorted(rng.uniform(1, 1000) for _ in range(8)))
    curve = Curve(sizes=sizes, seconds=tuple((2 + 0.05 * size) * rng.uniform(0.8, 1.2) for size in sizes))

    def squares(alpha: float, beta: float) -> float:
        return sum((alpha + beta * x - y) ** 2 / y**2 for x, y in zip(curve.sizes, curve.seconds, strict=True))

    best = squares(curve.alpha_s, curve.beta_s)
    for _ in range(500):
        alpha, beta = curve.alpha_s * rng.uniform(0.5, 1.5), curve.beta_s * rng.uniform(0.5, 1.5)
        assert best <= squares(alpha, beta) * (1 + 1e-9)
    errors = [abs(curve.alpha_s + curve.beta_s * x - y) / y for x, y in zip(curve.sizes, curve.seconds, strict=True)]
    assert curve.error == pytest.approx(max(errors))


def test_a_fit_starts_no_lower_than_zero_and_does_not_fall() -> None:
    convex = Curve(sizes=(10, 100, 1000), seconds=(0.01, 2.0, 400.0))
    assert convex.alpha_s == 0.0
    assert convex.beta_s > 0
    falling = Curve(sizes=(10, 100), seconds=(2.0, 1.0))
    assert falling.beta_s == 0.0
    assert 1.0 <= falling.alpha_s <= 2.0


def test_a_fit_in_a_file_that_does_not_belong_to_its_points_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    found = as_json(LINK, path)
    change(found, "collectives.all_reduce.alpha_s", 99.0)
    path.write_text(json.dumps(found))
    assert LinkTable.load(path) == LINK


def test_what_was_not_measured_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="holds all_reduce, scatter, not broadcast: measure the link again"):
        LINK.seconds("broadcast", 10)
    with pytest.raises(ValueError, match="holds topk, not dgc: measure it"):
        SELECT.seconds("dgc", 10)
    assert LINK.seconds("scatter", 100) == SELECT.seconds("topk", 100) == pytest.approx(2.0)
