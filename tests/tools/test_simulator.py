"""The simulator agrees with closed forms, keeps its schedules in order, and writes what it promises."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import micro
from experiments import simulate
from experiments.studies.simulated_steps.borders import borders, crossing
from experiments.studies.simulated_steps.method_choices import Methods, SelectionFormula
from experiments.studies.simulated_steps.published_gains import cluster_link, ratios
from experiments.studies.simulated_steps.step import Row, Way, simulate_step
from experiments.studies.simulated_steps.trace_changes import as_published, by_layer, rescaled
from experiments.training.schedule_problem import problem_of
from micro.planning.costs import Flat, Link
from micro.planning.nodes import FlatOnNodes
from micro.planning.schedules.base import timeline
from micro.planning.tables import Curve, LinkTable, SelectTable
from micro.planning.traces import Layer, Trace
from micro.planning.volumes import calls_of, volume_of
from tests.legible import every_figure_is_legible
from tests.refusals import refused

LINK = Link(1e-3, 2e-9)
WAYS = [Way("dense", name) for name in ("layerwise", "single", "mgwfbp", "exact")]
SPARSE = micro.SparseReducer(micro.Micro(), 0.1)
METHODS = Methods(
    reducers={"dense": micro.DenseReducer(), "micro": SPARSE},
    selection=lambda world_size: SelectionFormula(selectors={"micro": "micro"}, world_size=world_size, bytes_per_s=1e9),
)


def made_up_trace(model: str = "mlp") -> Trace:
    layers = tuple(
        Layer(f"{place // 2}.{'weight' if place % 2 else 'bias'}", 4 * numel, 0.002 * (place + 1), 0.001)
        for place, numel in enumerate((10, 5000, 100, 200_000, 64, 30_000, 8, 70_000))
    )
    return Trace(model=model, layers=layers, forward_s=0.008, backward_s=0.016, update_s=0.001)


def simulated(world_size: int, method: str, schedule: str, link: Link = LINK) -> Row:
    problem = METHODS.problem(made_up_trace(), Flat(link, world_size), method, world_size)
    return simulate_step(problem, schedule, world_size)


@pytest.mark.parametrize("world_size", [2, 5, 64])
def test_one_bucket_is_forward_backward_and_one_all_reduce(world_size: int) -> None:
    trace = made_up_trace()
    all_reduce = 2 * (world_size - 1) * (LINK.alpha_s + trace.num_bytes / world_size * LINK.beta_s)
    row = simulated(world_size, "dense", "single")
    assert row["step_s"] == pytest.approx(trace.compute_s + all_reduce)
    assert row["exposed_s"] == pytest.approx(all_reduce)
    assert row["num_groups"] == 1


def test_one_sparse_bucket_adds_its_selection() -> None:
    trace, world_size = made_up_trace(), 4
    formula = METHODS.selection(world_size).seconds("micro", trace.numel)
    assert formula == pytest.approx(trace.numel * (16 + 4 / world_size) / 1e9)
    row = simulated(world_size, "micro", "single")
    assert row["select_s"] == pytest.approx(formula)
    assert row["step_s"] == pytest.approx(trace.compute_s + formula + row["exposed_s"])


@pytest.mark.parametrize("world_size", [2, 8, 100, 2048])
def test_no_schedule_beats_the_exact_one(world_size: int) -> None:
    for method in METHODS.reducers:
        best = simulated(world_size, method, "exact")["step_s"]
        room = 1e-12 if method == "dense" else 0.15  # it does not know which messages of shared rounds come last
        for schedule in ("layerwise", "single", "mgwfbp"):
            assert best <= simulated(world_size, method, schedule)["step_s"] * (1 + room)


def test_speedup_is_linear_where_sending_takes_no_time() -> None:
    for world_size, way in itertools.product((2, 7, 512), WAYS):
        row = simulated(world_size, "dense", way.schedule, Link(0.0, 0.0))
        assert row["speedup"] == pytest.approx(world_size)
        assert row["efficiency"] == pytest.approx(1)


def test_one_worker_neither_sends_nor_selects() -> None:
    for method, schedule in itertools.product(METHODS.reducers, ("layerwise", "single", "exact")):
        row = simulated(1, method, schedule)
        assert row["speedup"] == pytest.approx(1)
        assert row["exposed_s"] == 0


def test_what_a_method_sends_is_paid_for_call_by_call() -> None:
    network, trace = Flat(LINK, 8), made_up_trace()
    calls = calls_of(SPARSE, trace.numel, 8)
    problem = problem_of(trace, network, SPARSE, 8)
    alone = timeline(problem, (len(trace.layers),))
    assert alone.exposed_s == pytest.approx(sum(network.seconds(op, size) for op, size in calls))
    latencies = [network.seconds(op, 0.0) for op, _ in calls]
    saved = sum(latencies) - max(latencies)
    assert problem.exchange(trace.num_bytes) == pytest.approx(alone.exposed_s - saved)  # beside those of other groups


def test_a_network_of_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="the network has 4 ranks, got world_size 8"):
        problem_of(made_up_trace(), Flat(LINK, 4), micro.DenseReducer(), 8)


def test_formula_of_top_k_grows_faster_than_its_vector() -> None:
    formula = SelectionFormula(selectors={"topk": "topk"}, world_size=4, bytes_per_s=1e9)
    assert formula.seconds("topk", 2**20) == pytest.approx(2**20 * (16e-9 + 20 * 2.18896957e-10))
    with pytest.raises(ValueError, match="no formula for the selection of randomk"):
        SelectionFormula(selectors={"randomk": "randomk"}, world_size=4, bytes_per_s=1e9)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 3.0])
def test_crossing_is_where_a_power_is_one(exponent: float) -> None:
    assert crossing(lambda rate: (3e9 / rate) ** exponent, 1e8, 1e11) == pytest.approx(3e9)
    assert crossing(lambda rate: (1e7 / rate) ** exponent, 1e8, 1e11) == 0
    assert crossing(lambda rate: (1e12 / rate) ** exponent, 1e8, 1e11) == math.inf


def test_a_method_gains_below_its_border_and_not_above() -> None:
    trace, rates = made_up_trace(), (1e8, 1e11)
    (row,) = borders(trace, replace(LINK, alpha_s=1e-5), METHODS, [16], rates)
    assert rates[0] < row["border"] < rates[1]
    for rate, gains in ((row["border"] / 1.5, True), (row["border"] * 1.5, False)):
        network = Flat(Link(1e-5, 8 / rate), 16)
        steps = {
            method: simulate_step(METHODS.problem(trace, network, method, 16), "exact", 16)["step_s"]
            for method in METHODS.reducers
        }
        assert (steps["micro"] < steps["dense"]) is gains


def test_rescaling_keeps_proportions() -> None:
    trace = made_up_trace()
    scaled = rescaled(trace, 10 * trace.compute_s)
    assert scaled.compute_s == pytest.approx(10 * trace.compute_s)
    assert [layer.ready_s for layer in scaled.layers] == pytest.approx([10 * layer.ready_s for layer in trace.layers])
    assert scaled.layers[0].used_s == pytest.approx(0.01)
    assert scaled.num_bytes == trace.num_bytes


def test_layers_keep_bytes_and_the_last_moment_of_their_parameters() -> None:
    trace = made_up_trace()
    merged = by_layer(trace)
    assert [layer.num_bytes for layer in merged.layers] == [
        a.num_bytes + b.num_bytes for a, b in zip(trace.layers[::2], trace.layers[1::2], strict=True)
    ]
    assert [layer.ready_s for layer in merged.layers] == [layer.ready_s for layer in trace.layers[1::2]]


def test_gains_of_merging_vanish_where_computation_hides_everything() -> None:
    slow = ratios(as_published(made_up_trace()), 16, 1000.0)
    assert slow["over_layerwise"] == pytest.approx(1, abs=1e-3)
    assert slow["over_single"] == pytest.approx(1, abs=1e-3)


def test_gain_over_layers_is_in_start_ups_where_computation_takes_no_time() -> None:
    trace = as_published(made_up_trace())
    whole = Flat(cluster_link(16), 64).seconds("all_reduce", trace.num_bytes)
    start_up = Flat(cluster_link(16), 64).seconds("all_reduce", 0)
    row = ratios(trace, 16, 1e-9)
    assert row["over_layerwise"] == pytest.approx(1 + (len(trace.layers) - 1) * start_up / whole, rel=1e-4)
    assert row["over_single"] == pytest.approx(1)


def test_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "new" / "out"
    made_up_trace("resnet50").save(trace)
    words = ["--trace", str(trace), "--workers", "1,4", "--methods", "dense,micro", "--out", str(out)]
    with every_figure_is_legible():
        assert simulate.main([*words, "--algorithm", "ring,double_tree"]) == 0
    assert "ResNet-50 on k80_10gbe, double_tree" in capsys.readouterr().out
    stems = ("speedup-k80_10gbe-ring", "speedup-k80_10gbe-double_tree", "borders", "headline", "double-trees")
    stems += tuple(f"timeline-resnet50-k80_10gbe-{algorithm}" for algorithm in ("ring", "double_tree"))
    figures = {f"{stem}.{suffix}" for stem in stems for suffix in ("pdf", "png", "csv")}
    assert {path.name for path in out.iterdir()} == figures | {"steps.csv", "simulate.md"}
    steps = pd.read_csv(out / "steps.csv")
    assert list(steps) == [
        *("model", "network", "algorithm", "compute_s", "workers", "method", "schedule"),
        *("num_groups", "step_s", "exposed_s", "select_s", "speedup", "efficiency"),
    ]
    assert len(steps) == 2 * 2 * (4 + 2)  # algorithms, numbers of workers, ways
    assert list(pd.read_csv(out / "borders.csv")) == ["model", "workers", "method", "border"]
    timeline = pd.read_csv(out / "timeline-resnet50-k80_10gbe-ring.csv").query("schedule == 'single'").set_index("what")
    single = steps.query("schedule == 'single' and algorithm == 'ring' and workers == 4 and method == 'dense'").iloc[0]
    assert timeline.loc["exchange", "begin_s"] == timeline.loc["backward", "end_s"], "one bucket waits for backward"
    exposed = timeline.loc["exchange", "end_s"] - timeline.loc["backward", "end_s"]
    assert exposed == pytest.approx(single["exposed_s"])
    assert simulate.main([*words[:-1], str(tmp_path / "few"), "--only", "speedup"]) == 0
    assert not {"borders.csv", "headline.csv"} & {path.name for path in (tmp_path / "few").iterdir()}


def test_faster_links_within_nodes_are_between_flat_and_linear(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    made_up_trace().save(trace)
    words = ["--trace", str(trace), "--workers", "1,4,32", "--methods", "dense", "--out", str(tmp_path)]
    algorithms = "--algorithm", "ring,double_tree,hierarchical,best"
    assert simulate.main([*words, *algorithms, "--ranks-per-node", "4", "--schedules", "single,exact"]) == 0
    steps = pd.read_csv(tmp_path / "steps.csv").pivot(
        index=["workers", "schedule"], columns="algorithm", values="speedup"
    )
    several = steps.drop(index=1)
    assert (several["ring"] < several["hierarchical"]).all()
    assert (several["hierarchical"] < several.index.get_level_values("workers")).all()
    assert (steps["best"] >= steps[["ring", "double_tree"]].max(axis=1) * (1 - 1e-12)).all()
    assert (steps.loc[1] == 1).all(axis=None)
    said = (tmp_path / "simulate.md").read_text()
    assert "## MLP on k80_10gbe, hierarchical, " in said
    assert "nodes of 4 workers, or one of fewer; v100_pcie is the network within" in said
    assert "with memory of 240 GB/s, an assumption, neither measured nor published." in said


def test_one_level_and_two_are_written_side_by_side(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "out"
    made_up_trace().save(trace)
    words = ["--trace", str(trace), "--network", "nvlink_25gbe", "--two-level", "--algorithm", "ring,hierarchical"]
    words += ["--workers", "1,8,2048", "--methods", "dense,topk", "--schedules", "single", "--out", str(out)]
    with every_figure_is_legible():
        assert simulate.main(words) == 0
    levels = pd.read_csv(out / "levels-nvlink_25gbe.csv")
    assert len(levels) == 2 * 3 * 2 * 2  # algorithms, numbers of workers, methods, levels
    assert set(levels["ranks_per_node"]) == {1, 8}
    of = levels.set_index(["algorithm", "workers", "method", "levels"])
    assert (of.loc["ring"].loc[1]["speedup"] == 1).all()
    assert (of.loc["ring"].loc[8]["between_bytes"] == 0).all()
    two = of.xs("two", level="levels")
    pd.testing.assert_frame_equal(two.loc["ring"], two.loc["hierarchical"], check_exact=False, rtol=1e-12)
    last = of.loc["ring"].loc[2048]
    assert last.loc[("topk", "two"), "step_s"] < last.loc[("topk", "one"), "step_s"]
    assert last.loc[("topk", "two"), "between_bytes"] < last.loc[("topk", "one"), "between_bytes"] / 4
    assert {path.suffix for path in out.glob("levels-*")} == {".pdf", ".png", ".csv"}
    said = (out / "levels.md").read_text()
    assert "*nvlink_25gbe*: nodes of 8 workers, or one of fewer; v100_nvlink within them." in said
    assert "## MLP on nvlink_25gbe, hierarchical, 0.025 s of computation" in said
    assert "nodes of 8 workers, or one of fewer; v100_nvlink is" in (out / "simulate.md").read_text()


def test_a_step_in_two_levels_is_its_parts_one_after_the_other() -> None:
    trace, local, num_nodes = made_up_trace(), 4, 8
    network = FlatOnNodes(intra=Link(1e-6, 1e-11), inter=LINK, ranks_per_node=local, num_nodes=num_nodes)
    problem = METHODS.two_level_problem(trace, network, "micro")
    row = simulate_step(problem, "single", network.world_size)
    volume = volume_of(micro.TwoLevel(reducer=SPARSE, ranks_per_node=local), trace.numel, network.world_size)
    between = Flat(Link(LINK.alpha_s, local * LINK.beta_s), num_nodes)
    sent = sum(network.within.seconds(op, size) for op, size in volume.local_calls)
    sent += max(sum(between.seconds(op, size) for op, size in calls) for calls in volume.place_calls)
    assert row["exposed_s"] == pytest.approx(sent)
    shard = METHODS.selection(num_nodes).seconds("micro", trace.numel / local)
    assert row["select_s"] == pytest.approx(shard + 20 * trace.numel / 1e9)
    assert METHODS.two_level_problem(trace, network, "dense").select(4000) == pytest.approx(20 * 1000 / 1e9)


def test_options_change_the_nodes_of_a_network(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    made_up_trace().save(trace)
    words = ["--trace", str(trace), "--methods", "dense", "--schedules", "single", "--out", str(tmp_path)]
    words += ["--workers", "16", "--network", "v100_56gib", "--two-level", "--intra", "v100_pcie"]
    assert simulate.main([*words, "--ranks-per-node", "4"]) == 0
    assert "nodes of 4 workers, or one of fewer; v100_pcie within" in (tmp_path / "levels.md").read_text()
    assert set(pd.read_csv(tmp_path / "levels-v100_56gib.csv")["ranks_per_node"]) == {4}


def test_measured_tables_take_the_place_of_models(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("trace", "link", "select")}
    made_up_trace().save(files["trace"])
    curve = Curve(sizes=(0.0, 1e6), seconds=(1e-3, 3e-3))
    ops = ("all_reduce", "gather_rows", "gather_lists", "scatter")
    LinkTable(world_size=4, collectives=dict.fromkeys(ops, curve)).save(files["link"])  # type: ignore[arg-type]
    SelectTable(world_size=4, density=0.1, methods={"micro": curve}).save(files["select"])
    words = [f"--{name}={path}" for name, path in files.items()]
    words = [word.replace("--link", "--network") for word in words]
    assert (
        simulate.main([*words, "--workers", "2", "--methods", "micro", "--out", str(tmp_path), "--compute-s", "2"]) == 0
    )
    steps = pd.read_csv(tmp_path / "steps.csv")
    assert set(steps["workers"]) == {4}
    single = steps[steps["schedule"] == "single"].set_index("method")
    assert single.loc["dense", "step_s"] == pytest.approx(2 + curve.at(made_up_trace().num_bytes))
    assert single.loc["micro", "select_s"] == pytest.approx(curve.at(made_up_trace().numel))


MISTAKES = {
    "--schedules exat": "exact",
    "--methods micr": "micro",
    "--methods powersgd": "powersgd",
    "--methods randomk": "randomk",
    "--algorithm rings": "ring",
    "--only border": "borders",
    "--ranks-per-node 4": "--ranks-per-node",
    "--intra v100_pcie --algorithm ring": "--intra",
    "--two-level": "nvlink_25gbe|pcie_10gbe",
    "--two-level --network link.json": "network link",
    "--two-level --intra v100_pcie": "--ranks-per-node",
    "--two-level --network nvlink_25gbe --workers 8,12": "nodes of 8",
    "--network nvlink_25gbe --algorithm best": "best",
    "--two-level --network nvlink_25gbe --select x.json": "--select",
    "--algorithm hierarchical --intra nccl_pcie": "nccl_pcie",
    "--network k80": "k80",
    "--network ideal": "alpha_s",
    "--network nowhere.json": "nowhere.json",
    "--select nowhere.json": "nowhere.json",
    "--compute-s -1": "--compute-s",
    "--memory-gb-s 0": "--memory-gb-s",
    "--trace nowhere.json": "nowhere.json",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words: str, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "out"
    made_up_trace().save(trace)
    refused(f"simulate --trace {trace} --out {out} {words}", MISTAKES[words])
    assert not out.exists()
