"""The simulator agrees with closed forms, and writes what it promises."""

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

import micro
from experiments import simulate
from experiments.config import CONF, ROOT
from experiments.planning.costs import Flat, Link
from experiments.planning.nodes import FlatOnNodes
from experiments.planning.problem import problem_of
from experiments.planning.schedules.base import timeline
from experiments.planning.tables import Curve, LinkTable, SelectTable
from experiments.planning.traces import Layer, Trace
from experiments.tools.simulate.method_choices import Methods, formula_s, methods_of
from experiments.tools.simulate.published_gains import cluster_link, ratios
from experiments.tools.simulate.steps import Row, by_layer, crossing, simulate_step
from experiments.tools.simulate.tables import rate_name
from micro.predicted_traffic import calls_of, volume_of
from tests.legible import every_figure_is_legible
from tests.refusals import refused

LINK = Link(1e-3, 2e-9)
SPARSE = micro.SparseReducer(micro.Micro(), 0.1)


METHODS = Methods(
    reducers={"dense": micro.DenseReducer(), "micro": SPARSE},
    own_s=partial(formula_s, bytes_per_s=1e9),
    bytes_per_s=1e9,
)


def made_up_trace(model: str = "mlp") -> Trace:
    layers = tuple(
        Layer(f"{place // 2}.{'weight' if place % 2 else 'bias'}", 4 * numel, 0.002 * (place + 1), 0.001)
        for place, numel in enumerate((10, 5000, 100, 200_000, 64, 30_000, 8, 70_000))
    )
    return Trace(model=model, layers=layers, forward_s=0.008, backward_s=0.016, update_s=0.001)


TRACE = made_up_trace()


def simulated(world_size: int, method: str, schedule: str, link: Link = LINK) -> Row:
    return simulate_step(METHODS.problem(TRACE, Flat(link, world_size), method), schedule, world_size)


@pytest.mark.parametrize("world_size", [2, 5, 64])
def test_one_bucket_is_forward_backward_selection_and_its_collectives(world_size: int) -> None:
    all_reduce = 2 * (world_size - 1) * (LINK.alpha_s + TRACE.num_bytes / world_size * LINK.beta_s)
    dense, sparse = (simulated(world_size, method, "single") for method in METHODS.reducers)
    assert (dense["num_groups"], dense["select_s"]) == (1, 0)
    assert (dense["exposed_s"], dense["step_s"]) == pytest.approx((all_reduce, TRACE.compute_s + all_reduce))
    assert sparse["select_s"] == pytest.approx(TRACE.numel * (16 + 4 / world_size) / 1e9)
    calls = calls_of(SPARSE, TRACE.numel, world_size)
    assert sparse["exposed_s"] == pytest.approx(sum(Flat(LINK, world_size).seconds(*call) for call in calls))
    assert sparse["step_s"] == pytest.approx(TRACE.compute_s + sparse["select_s"] + sparse["exposed_s"])


def test_speedup_is_linear_where_nothing_is_sent() -> None:
    for schedule in ("layerwise", "single", "mgwfbp", "exact"):
        for world_size in (2, 7, 512):
            row = simulated(world_size, "dense", schedule, Link(0.0, 0.0))
            assert (row["speedup"], row["efficiency"]) == pytest.approx((world_size, 1))
        for method in METHODS.reducers:
            row = simulated(1, method, schedule)
            assert (row["speedup"], row["exposed_s"]) == (pytest.approx(1), 0)


def test_a_group_adds_one_latency_to_a_step_whose_groups_share_rounds() -> None:
    network = Flat(LINK, 8)
    latencies = [network.seconds(op, 0.0) for op, _ in calls_of(SPARSE, TRACE.numel, 8)]
    problem = problem_of(TRACE, network, SPARSE)
    alone = timeline(problem, (len(TRACE.layers),)).exposed_s
    assert problem.exchange(TRACE.num_bytes) == pytest.approx(alone - sum(latencies) + max(latencies))


def test_a_step_in_two_levels_is_its_parts_one_after_the_other() -> None:
    local, num_nodes = 4, 8
    network = FlatOnNodes(intra=Link(1e-6, 1e-11), inter=LINK, ranks_per_node=local, num_nodes=num_nodes)
    row = simulate_step(METHODS.two_level_problem(TRACE, network, "micro"), "single", network.world_size)
    volume = volume_of(micro.TwoLevel(reducer=SPARSE, ranks_per_node=local), TRACE.numel, network.world_size)
    between = Flat(Link(LINK.alpha_s, local * LINK.beta_s), num_nodes)
    sent = sum(network.within.seconds(op, size) for op, size in volume.local_calls)
    sent += max(sum(between.seconds(op, size) for op, size in calls) for calls in volume.place_calls)
    assert row["exposed_s"] == pytest.approx(sent)
    shard = formula_s("micro", TRACE.numel / local, num_nodes, 1e9)
    assert row["select_s"] == pytest.approx(shard + 20 * TRACE.numel / 1e9)
    assert METHODS.two_level_problem(TRACE, network, "dense").select(4000) == pytest.approx(20 * 1000 / 1e9)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 3.0])
def test_crossing_is_where_a_power_is_one(exponent: float) -> None:
    assert crossing(lambda rate: (3e9 / rate) ** exponent, 1e8, 1e11) == pytest.approx(3e9)
    assert crossing(lambda rate: (1e7 / rate) ** exponent, 1e8, 1e11) == 0
    assert crossing(lambda rate: (1e12 / rate) ** exponent, 1e8, 1e11) == math.inf


def test_gains_of_merging_are_in_start_ups_and_vanish_where_computation_hides_everything() -> None:
    assert list(ratios(TRACE, 16, 1000.0).values()) == pytest.approx([1, 1], abs=1e-3)
    all_reduce = Flat(cluster_link(16), 64).seconds
    start_up = all_reduce("all_reduce", 0) / all_reduce("all_reduce", TRACE.num_bytes)
    found = ratios(replace(TRACE, update_s=0.0), 16, 1e-9)
    assert found["over_layerwise"] == pytest.approx(1 + (len(TRACE.layers) - 1) * start_up, rel=1e-4)
    assert found["over_single"] == pytest.approx(1)


def run(tmp_path: Path, words: str, model: str = "mlp") -> tuple[Path, pd.DataFrame]:
    """Run the command on the trace; return the folder of what it wrote, and its steps."""
    made_up_trace(model).save(tmp_path / "trace.json")
    out = tmp_path / "new" / "out"
    with every_figure_is_legible():
        assert simulate.main([*words.split(), f"--trace={tmp_path / 'trace.json'}", f"--out={out}"]) == 0
    return out, pd.read_csv(out / "steps.csv")


def test_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--workers 1,4 --methods dense,micro --algorithm ring,double_tree"
    out, steps = run(tmp_path, words, model="resnet50")
    assert "ResNet-50 on k80_10gbe, double_tree" in capsys.readouterr().out
    ends = [f"k80_10gbe-{algorithm}" for algorithm in ("ring", "double_tree")]
    of_each = [f"{stem}-{end}" for stem in ("speedup", "timeline-resnet50", "breakdown-resnet50") for end in ends]
    stems = ["borders", "headline", "sizes-resnet50", *of_each]
    figures = {f"{stem}.{suffix}" for stem in stems for suffix in ("pdf", "png", "csv")}
    assert {path.name for path in out.iterdir()} == figures | {"steps.csv", "nearest.csv", "simulate.md"}
    assert list(steps) == [
        *("model", "network", "algorithm", "compute_s", "workers", "method", "schedule"),
        *("num_groups", "step_s", "exposed_s", "select_s", "speedup", "efficiency"),
    ]
    assert len(steps) == 2 * 2 * (4 + 2)  # algorithms, numbers of workers, schedules of dense and of MiCRO
    bars = pd.read_csv(out / "timeline-resnet50-k80_10gbe-ring.csv").query("schedule == 'single'")
    (first, *_, last), (sent,) = (bars[bars["what"] == what].to_dict("records") for what in ("backward", "exchange"))
    assert (first["begin_s"], len(bars)) == (0, 1 + len(by_layer(TRACE).layers)), "a bar for each layer, and a message"
    single = steps.query("schedule == 'single' and algorithm == 'ring' and workers == 4 and method == 'dense'").iloc[0]
    assert sent["begin_s"] == last["end_s"], "one bucket waits for backward"
    assert sent["end_s"] - last["end_s"] == pytest.approx(single["exposed_s"])


def test_at_its_border_a_method_takes_as_long_as_dense(tmp_path: Path) -> None:
    out, _ = run(tmp_path, "--workers 4 --methods micro --only borders --compute-s trace")
    (border,) = pd.read_csv(out / "borders.csv")["border"]
    trace, found = by_layer(TRACE), {}
    for factor, method in itertools.product((1 / 1.5, 1.5), ("dense", "micro")):
        network = Flat(replace(cluster_link(), beta_s=8 / (border * factor)), 4)
        methods, _ = methods_of([method], 0.001, table=None, memory_gb_s=240)
        found[factor, method] = simulate_step(methods.problem(trace, network, method), "exact", 4)["step_s"]
    assert found[1 / 1.5, "micro"] < found[1 / 1.5, "dense"]
    assert found[1.5, "micro"] > found[1.5, "dense"]


def test_faster_links_within_nodes_are_between_flat_and_linear(tmp_path: Path) -> None:
    words = "--workers 1,4,32 --methods dense --algorithm ring,double_tree,hierarchical,best --ranks-per-node 4"
    out, steps = run(tmp_path, f"{words} --schedules single,exact --only speedup")
    assert not list(out.glob("borders*")), "only what was asked for"
    by = steps.pivot(index=["workers", "schedule"], columns="algorithm", values="speedup")
    several = by.drop(index=1)
    assert (several["ring"] < several["hierarchical"]).all()
    assert (several["hierarchical"] < several.index.get_level_values("workers")).all()
    assert (by["best"] >= by[["ring", "double_tree"]].max(axis=1) * (1 - 1e-12)).all()
    said = (out / "simulate.md").read_text()
    for words in ("nodes of 4 workers", "v100_pcie", "240 GB/s, an assumption, neither measured nor published"):
        assert words in said


def test_one_level_and_two_are_written_side_by_side(tmp_path: Path) -> None:
    words = "--network nvlink_25gbe --two-level --algorithm ring,hierarchical --workers 1,8,2048"
    out, _ = run(tmp_path, f"{words} --methods dense,topk --schedules single --only speedup")
    levels = pd.read_csv(out / "levels-nvlink_25gbe.csv")
    assert set(levels["ranks_per_node"]) == {1, 8}
    of = levels.set_index(["algorithm", "workers", "method", "levels"])
    assert len(of) == 2 * 3 * 2 * 2
    assert of.loc["ring"].loc[1]["speedup"].to_list() == pytest.approx([1] * 4)
    assert (of.loc["ring"].loc[8]["between_bytes"] == 0).all()
    two = of.xs("two", level="levels")
    pd.testing.assert_frame_equal(two.loc["ring"], two.loc["hierarchical"], check_exact=False, rtol=1e-12)
    topk = of.loc["ring"].loc[2048].loc["topk"]
    assert topk.loc["two", "step_s"] < topk.loc["one", "step_s"]
    assert topk.loc["two", "between_bytes"] < topk.loc["one", "between_bytes"] / 4
    said = (out / "levels.md").read_text()
    assert "nodes of 8 workers" in said
    assert "## MLP on nvlink_25gbe, hierarchical, 0.025 s of computation" in said


def test_workers_of_one_node_send_nothing_between_nodes(tmp_path: Path) -> None:
    words = "--network nvlink_25gbe --two-level --workers 4,8 --methods dense,topk --schedules single --only speedup"
    out, _ = run(tmp_path, words)
    assert (out / "levels-nvlink_25gbe.pdf").exists()


def test_measured_tables_take_the_place_of_models(tmp_path: Path) -> None:
    curve = Curve(sizes=(0.0, 1e6), seconds=(1e-3, 3e-3))
    ops = ("all_reduce", "gather_rows", "gather_lists", "scatter")
    LinkTable(world_size=4, collectives=dict.fromkeys(ops, curve)).save(tmp_path / "link.json")  # type: ignore[arg-type]
    SelectTable(world_size=4, density=0.1, methods={"micro": curve}).save(tmp_path / "select.json")
    files = f"--network {tmp_path}/link.json --select {tmp_path}/select.json"
    _, steps = run(tmp_path, f"{files} --methods micro --compute-s 2 --only speedup")
    assert set(steps["workers"]) == {4}
    single = steps[steps["schedule"] == "single"].set_index("method")
    assert single.loc["dense", "step_s"] == pytest.approx(2 + curve.at(TRACE.num_bytes))
    assert single.loc["micro", "select_s"] == pytest.approx(curve.at(TRACE.numel))
    for words, parts in (("--workers 2,8", ("--workers", 4, "2, 8")), ("--algorithm best", ("--algorithm", "best"))):
        refused(f"simulate {words} {files} --trace={tmp_path}/trace.json", *parts)


def test_a_method_whose_groups_need_shapes_is_refused() -> None:
    refused(f"simulate --methods powersgd --trace {ROOT}/results/published/traces/resnet18.json", "powersgd", "shapes")


def test_published_traces_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = simulate.parser().parse_args(["--trace", "results/published/traces/resnet18.json"])
    assert [path.exists() for options in (named, simulate.parser().parse_args([])) for path in options.trace] == [
        True
    ] * 4


def test_two_networks_of_one_name_are_refused(tmp_path: Path) -> None:
    copy = tmp_path / "mine.yaml"
    copy.write_text(OmegaConf.to_yaml({"name": "k80_10gbe", **OmegaConf.load(CONF / "networks.yaml").k80_10gbe}))
    refused(f"simulate --network k80_10gbe,{copy} --out {tmp_path}", "--network", "k80_10gbe")


@pytest.mark.parametrize(
    ("rate", "name"),
    [(0.5, "0.5"), (100, "100"), (1e8, "100M"), (999.7e6, "1G"), (1.234e9, "1.23G"), (1e16, "10000T"), (0, "never")],
)
def test_rates_have_three_digits_and_a_unit(rate: float, name: str) -> None:
    assert rate_name(rate) == name
