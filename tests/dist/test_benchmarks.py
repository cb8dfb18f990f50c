"""The benchmarks whose tables stand on the pages run, small, through their entry point."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pandas as pd
import pytest
import torch

from experiments.bench import main
from experiments.benchmarks import (
    against,
    bare_training,
    goals,
    gpu_ranks,
    loop,
    network,
    start,
    step_rows,
    step_turns,
)
from experiments.benchmarks import step as step_benchmark
from experiments.benchmarks.network_methods import MethodProfile, joined
from experiments.benchmarks.passes import count_passes
from experiments.config.paths import ROOT
from experiments.launching import measurements
from experiments.launching.namespaces import unavailable
from experiments.studies.methods import known_methods
from micro import kernels
from micro.planning.tables import Curve, LinkTable
from tests.dist.processes import ranks
from tests.dist.rank_functions import both_ways, largest_messages

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
MLP = ["model=mlp", "dataset=synthetic", "batch_size=4"]


def bench(folder: Path, *words: str) -> pd.DataFrame:
    """Run a benchmark, which makes its folder, and return its table."""
    main([words[0], "--out", str(folder / "new" / "out"), *words[1:]])
    return pd.read_csv(folder / "new" / "out" / f"{words[0]}.csv")


def test_loop(tmp_path: Path) -> None:
    table = bench(tmp_path, "loop", "--steps", "2", *MLP)
    assert len(table) == 1
    assert (table[["harness_s", "bare_s", "ratio", "harness_cpu_s", "bare_cpu_s"]] > 0).all(axis=None)


def test_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"experiments.train": iter([9.0, 3.0, 8.0]), "torch.distributed.run": iter([9.0, 2.0, 2.0])}
    monkeypatch.setattr(start, "timed", lambda words: (next(seconds[words[1]]), 1.0))
    table = bench(tmp_path, "start", "--pairs", "2")
    assert table["ratio"].tolist() == [1.5, 4.0]  # the first pair does not count
    assert table["processor_ratio"].tolist() == [1.0, 1.0]


@pytest.mark.xdist_group("ranks")
def test_the_bare_training_learns_as_long_as_ours(tmp_path: Path) -> None:
    ranks(2).run_apart(bare_training.main, str(tmp_path / "weights.pt"))
    trained = torch.load(tmp_path / "weights.pt")
    assert sum(values.numel() for values in trained.values()) == 8970
    assert all(values.isfinite().all() for values in trained.values())


class SharedRanks:
    """Stands for a RankGroup: the ranks that tests share."""

    def __init__(self, world_size: int, *, backend: str, code: Path | None = None) -> None:
        self._ranks = ranks(world_size, backend)
        self.code = code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._ranks.run(function, *arguments)

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._sent = function, *arguments

    def receive(self) -> list[Any]:
        return self.call(*self._sent)


STEP = ("--numel", "2000", "--density", "0.05", "--methods", "micro,topk", "--steps", "2", "--limit", "0.01")


@pytest.mark.xdist_group("ranks")
def test_step_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurements, "RankGroup", SharedRanks)  # test_loop starts ranks of its own
    measure, measured = step_benchmark._measure, []

    def stopped_once(group: Any, settings: dict[str, Any]) -> dict[str, Any]:
        measured.append(settings["method"])
        if measured == ["micro", "topk"]:
            raise KeyboardInterrupt
        return measure(group, settings)

    monkeypatch.setattr(step_benchmark, "_measure", stopped_once)
    with pytest.raises(SystemExit, match="130"):
        bench(tmp_path, "step", *STEP)
    assert "1 of 3: micro, d = 2,000, density 0.05: " in capsys.readouterr().out
    table = bench(tmp_path, "step", *STEP)
    assert measured == ["micro", "topk", "topk", "(torch.topk alone)"]
    assert "(kept from before)" in capsys.readouterr().out.splitlines()[0]
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == [
        "step.csv"
    ]  # the next measurement begins anew
    assert table["method"].tolist()[:2] == ["micro", "topk"]
    assert (table[["total_s", "floor_s"]] > 0).all(axis=None)
    assert set(table["numel"]) == {2000}
    assert table["goal_floors"].tolist()[:2] == [1.5, 2.5]
    assert (table["passes"][:2] >= 1).all()
    assert (table["bytes_per_element"][:2] >= 16).all()
    assert ((table["floors_q1"] <= table["floors"]) & (table["floors"] <= table["floors_q3"])).all()


@pytest.mark.xdist_group("ranks")
def test_steps_of_an_older_revision_and_of_this_code_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    took: list[tuple[bool, str]] = []

    class Side(SharedRanks):
        def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
            if self.code:  # what measures there is this code's
                older = self.code / "experiments/benchmarks/step_turns.py"
                assert older.read_text() == Path(step_turns.__file__).read_text()
            took.append((self.code is not None, function.__name__))
            if len(took) == 12:  # amid the second method
                raise KeyboardInterrupt
            found = super().call(function, *arguments)
            return [{**found[0], "floors": 4.0 if self.code else 2.0}] if function is step_turns.turn else found

    monkeypatch.setattr(measurements, "RankGroup", Side)
    words = ("step", *STEP, "--against", "HEAD", "--pairs", "2", "--out", str(tmp_path))
    with pytest.raises(SystemExit, match="130"):
        main(words)
    first = [(True, "turn"), (False, "turn")]  # to warm up
    assert took[4:10] == [*first, *reversed(first), *first]
    capsys.readouterr()
    main(words)
    assert "(kept from before)" in capsys.readouterr().out.splitlines()[0]
    table = pd.read_csv(tmp_path / "step-against.csv")
    assert table["method"].tolist() == ["micro", "topk"]
    assert table[["floors", "old_floors", "new_floors"]].to_numpy().tolist() == [[0.5, 4.0, 2.0]] * 2
    assert table["bytes_sent"].tolist() == pytest.approx([1.0, 1.0], abs=0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-against.csv"]


def test_rows_of_other_settings_or_other_code_are_measured_again(tmp_path: Path) -> None:
    kept = step_rows.KeptRows(tmp_path / "rows.jsonl")
    settings = {"method": "micro", "numel": 2000, "density": 0.01}
    kept.keep(settings, {"floors": 1.5})
    again = step_rows.KeptRows(tmp_path / "rows.jsonl")
    assert again.find(settings) == {"floors": 1.5}
    assert again.find({**settings, "density": 0.001}) is None
    again._code["revision"] = "another"
    assert again.find(settings) is None


@pytest.mark.xdist_group("ranks")
def test_steps_of_several_ranks_stand_beside_an_all_reduce() -> None:
    def row(settings: dict[str, Any]) -> dict[str, Any]:
        first, second = ranks(2).run(gpu_ranks.work, settings)
        assert first.keys() == second.keys()
        return first

    lines = list(gpu_ranks.table(["topk", "dense"], 1000, row))
    cells = [[cell.strip(" |`") for cell in line.split(" | ")] for line in lines[2:]]
    assert [name for name, *_ in cells] == ["topk", "dense"]
    assert all(int(each[1]) == 2 and float(each[2]) > 0 and float(each[3]) > 0 for each in cells)
    assert float(cells[1][-1]) == 0.004  # of 1000 numbers, twice a half


def test_a_slow_method_takes_fewer_steps() -> None:
    assert step_turns.counts(0.01, steps=15, limit_s=7.0) == (40, 15)
    assert step_turns.counts(0.2, steps=15, limit_s=7.0) == (27, 8)
    assert step_turns.counts(9.0, steps=15, limit_s=7.0) == (10, 5)
    assert step_turns.counts(9.0, steps=2, limit_s=7.0) == (10, 2)


def test_passes_count_operations_and_compiled_loops() -> None:
    x, residual = torch.ones(5000), torch.zeros(5000)

    def step() -> None:
        kernels.absorb_(residual, x)  # one
        residual[:2500].abs().sum()  # two halves
        residual.view(50, 100)[0, :10].sum()  # next to nothing
        torch.empty_like(x)
        x.index_select(0, torch.arange(10))

    passes, bytes_per_element = count_passes(step, 5000)
    assert passes == 2
    assert bytes_per_element == pytest.approx(16 + (4 + 4 + 4) / 2, abs=0.01)


def test_every_method_has_a_goal_or_is_held_against_something_else() -> None:
    methods = {name.split("_")[0] for name in known_methods()}
    assert methods == set(goals.FLOORS) | goals.NOT_IN_FLOORS
    assert goals.verdict("qsgd_published", 4.0) == "yes"
    assert goals.verdict("qsgd_published", 4.1) == "no"
    assert goals.verdict("qsgd_published", 4.1, bytes_in_floors=4.05) == "no: bytes"
    assert goals.verdict("powersgd", 9.0) == ""


def test_ranks(tmp_path: Path) -> None:
    table = bench(
        tmp_path, "ranks", *("--numel", "4096", "--ranks", "2,64", "--methods", "micro,cltk,dsa", "--steps", "2")
    )
    assert table["method"].tolist() == ["micro", "micro", "cltk", "cltk", "dsa", "dsa"]
    assert table["ranks"].tolist() == [2, 64] * 3
    assert (table[["ms", "ratio"]] > 0).all(axis=None)


def test_an_older_revision_and_this_code_measure_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Path] = []

    def run(command: list[str], *, cwd: Path, **others: object) -> subprocess.CompletedProcess[str]:
        assert (cwd / "experiments/bench.py").exists()
        assert command[3:-2] == ["ranks", "--numel", "4096", "--methods", "micro"]
        ran.append(cwd)
        ms = {"ranks": [4, 64], "ms": [1.0, 2.0 * len(ran)]} if cwd != ROOT else {"ranks": [64, 4], "ms": [6.0, 0.5]}
        Path(command[-1]).mkdir()
        pd.DataFrame({"method": "micro", "numel": 4096, **ms}).to_csv(Path(command[-1]) / "ranks.csv")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(against, "_run", run)
    words = ["ranks", "--numel", "4096", "--against=HEAD", "--methods", "micro", "--pairs", "2"]
    main([*words, "--out", str(tmp_path)])
    table = pd.read_csv(tmp_path / "ranks-against.csv")
    old = ran[0]
    assert ran == [old, ROOT, old, ROOT]
    assert not old.exists()
    assert table["ranks"].tolist() == [4, 64]
    assert table["ms"].tolist() == [0.5, 2.0]  # 64 ranks: 6 / 2 and 6 / 6
    assert table[["ms_least", "ms_most"]].to_numpy().tolist() == [[0.5, 0.5], [1.0, 3.0]]


def test_a_revision_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["step", "--against", "--help-me", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main(["step", "--against", "no/such/revision", "--out", str(tmp_path)])
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --against must be a revision of the repository")


def test_loading(tmp_path: Path) -> None:
    table = bench(tmp_path, "loading", "--steps", "2", *MLP)
    assert table["batch_size"].tolist() == [4]
    assert 0 < table["share"][0] < 1


def test_rules(tmp_path: Path) -> None:
    table = bench(tmp_path, "rules", "--numel", "2000", "--density", "0.01", "--world-size", "2", "--steps", "6")
    assert set(table["rule"]) == {"agreed", "repaired", "published"}
    assert len(table) == 3 * 4 * 6  # rules, gradients, steps
    assert (tmp_path / "new" / "out" / "rules.pdf").exists()


@pytest.mark.xdist_group("ranks")
def test_a_message_is_as_large_as_that_of_the_rank_that_sends_most() -> None:
    assert ranks(2).run(largest_messages)[0] == [("scatter", 22.0)]  # the mean of 20 and 24


def test_a_method_takes_its_own_messages_over_a_link() -> None:
    found = [(0.1, [("gather_rows", 4.0)]), (1.0, [("scatter", 60.0), ("all_reduce", 400.0)])]
    profile = MethodProfile(**joined([10, 100], found))  # type: ignore[arg-type]
    curves = {
        op: Curve(sizes=(0, 1000), seconds=(start, start + 1)) for op, start in (("scatter", 1), ("all_reduce", 2))
    }
    table = LinkTable(world_size=2, collectives=curves)  # type: ignore[arg-type]
    assert profile.exchange_s(100, table) == pytest.approx(1.06 + 2.4)
    assert profile.exchange_s(10, table) == pytest.approx(1.006 + 2.04)  # searched there: in proportion
    assert profile.slowed(2).select_s(55) == pytest.approx(1.1)
    assert profile.messages(100, table) == (pytest.approx((1, 0.06)), pytest.approx((2, 0.4)))


@pytest.mark.xdist_group("ranks")
def test_a_scatter_counts_by_the_busier_direction_of_a_link() -> None:
    assert ranks(2).run(both_ways) == [[("scatter", 20)]] * 2


def test_the_loop_takes_medians_over_pairs_and_the_slowest_rank() -> None:
    assert loop.over_ranks([((2.0, 1.0), (1.0, 1.0)), ((3.0, 2.0), (0.5, 3.0))]) == ((3.0, 1.5), (1.0, 2.0))
    pairs = [((ratio, 4.0), (1.0, 3.5)) for ratio in (1.0, 9.0, 1.1, 1.2, 0.1)]
    found = loop.summary(pairs)
    assert (found["ratio"], found["ratio_low"], found["ratio_high"]) == (1.1, 0.1, 9.0)
    assert (found["harness_s"], found["bare_s"], found["added_cpu_s"]) == (1.1, 1.0, 0.5)
    many = [((float(ratio), 1.0), (1.0, 1.0)) for ratio in range(101)]
    assert (loop.summary(many)["ratio_low"], loop.summary(many)["ratio_high"]) == (40.0, 60.0)


def test_a_network_run_that_is_stopped_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict.fromkeys(("forward_s", "update_s", "backward_s", "cpu_s", "kernel_s"), 0.1)
    both = {f"{prefix}{part}": value for part, value in known.items() for prefix in ("", "alone_")}
    seconds = {"step_s": 0.5, "least_s": 0.4, "most_s": 0.6, "compute_s": 0.25, "wire_s": 0.2, "predicted_s": 0.45}
    parts = {"predicted_exposed_s": 0.1, "predicted_select_s": 0.0, "samples_per_s": 9.0, "num_steps": 2}
    row = {"rate": "1gbit", "method": "ddp", "title": "DDP", "link_bytes": 2e6, "counted_bytes": 1e6}

    def measured(*_: object) -> Iterator[dict[str, object]]:
        yield row | seconds | parts | both
        raise KeyboardInterrupt

    monkeypatch.setattr(network, "_measured", measured)
    written = tmp_path / "new" / "folder" / "page.md"
    with pytest.raises(SystemExit, match="130"):
        main(["network", "--out", str(tmp_path), "--page", str(written), *MLP])
    assert pd.read_csv(tmp_path / "network.csv")["over_bound"].tolist() == [2.0]
    assert "above the larger of computation and wire: DDP 2.00. Predictions off" in written.read_text()
    assert " 250.0 |" in written.read_text()  # ms above the bound


@pytest.mark.net
@pytest.mark.xdist_group("hosts")
def test_network(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    words = ["--rates", "1gbit", "--hosts", "2", "--steps", "1", "--link-seconds", "1"]
    table = bench(tmp_path, "network", *words, "--methods", "ddp,dense:mgwfbp,micro", *MLP)
    assert table["method"].tolist() == ["ddp", "dense:mgwfbp", "micro"]
    # A sparse step of so small a model sends fewer bytes than the barriers do.
    assert table["link_share"][:2].between(0.95, 1.2).all(), table["link_share"].tolist()
    assert (table[["step_s", "compute_s", "predicted_s"]].dropna() > 0).all(axis=None)
    assert (tmp_path / "new" / "out" / "network.pdf").exists()
