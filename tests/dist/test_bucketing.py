"""From a schedule to DDP's buckets: a plan of rank 0, agreed on and carried out; what does not fit is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.config.builders import build_model
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.planning.schedules.base import Plan
from experiments.planning.tables import Curve, LinkTable, SelectTable
from experiments.planning.traces import Layer, Trace
from experiments.training.bucketing import agreed_plan, check_buckets, gradient_bytes
from experiments.training.preflight import prepare_runs
from micro.comm.group import GroupComm
from tests.dist.processes import ranks
from tests.dist.rank_functions import Ended, train
from tests.refusals import NOTHING, refused

pytestmark = pytest.mark.xdist_group("ranks")
WORDS = (
    "dataset=synthetic",
    "dataset.settings={num_samples: 64, image_size: 8, channels: 1, num_classes: 10}",
    "model=resnet8",
    "batch_size=8",
    "epochs=1",
    "cluster.nproc_per_node=2",
)
MS = 1e-3


def model_of(config: TrainConfig) -> nn.Module:
    return build_model(config, {"in_channels": 1, "num_classes": 10, "image_size": 8})


def measured(folder: Path, *, turned: bool = False) -> dict[str, str]:
    """Write files as the profiler does: the real order of ResNet-8's gradients, one millisecond each."""
    (config,) = prepare_runs([list(WORDS)])
    model, order = model_of(config), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    sizes = gradient_bytes(model)
    named = reversed(order) if turned else order
    layers = tuple(Layer(name, sizes[name], MS * (1 + place)) for place, name in enumerate(named))
    line = Curve(sizes=(0.0, 1e6), seconds=(MS / 2, 100 * MS))
    collectives = dict.fromkeys(("all_reduce", "gather_rows", "gather_lists"), line)
    methods = {"micro": Curve(sizes=(0.0, 1e6), seconds=(MS / 10, MS))}
    tables = {
        "trace": Trace(model="resnet8", layers=layers, forward_s=10 * MS, backward_s=len(order) * MS),
        "link": LinkTable(world_size=2, collectives=collectives),
        "select": SelectTable(world_size=2, density=0.01, methods=methods),
    }
    for name, table in tables.items():
        table.save(folder / f"{name}.json")
    return {name: f"schedule.{name}={folder / name}.json" for name in tables}


def exact(folder: Path, *, turned: bool = False) -> list[str]:
    """Return the words of a dense run that is planned from what was measured."""
    files = measured(folder, turned=turned)
    return [*WORDS, "schedule=exact", files["trace"], files["link"], "sparsifier=dense"]


def trained(*words: str) -> Ended:
    """Train on the shared ranks, which join like ranks of torchrun; return how rank 0 ended."""
    ended: list[Ended] = ranks(2).run_apart(train, *words)
    assert len({each.returncode for each in ended}) == 1, ended
    return ended[0]


def num_collectives(output: Path) -> tuple[Path, list[int]]:
    """Return the folder of the only run, and the collectives of each of its steps."""
    (folder,) = output.iterdir()
    return folder, [json.loads(line)["num_collectives"] for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.dist
@pytest.mark.parametrize(("sparsifier", "calls"), [("dense", 1), ("micro", 3)])
def test_a_training_runs_in_the_planned_buckets(tmp_path: Path, sparsifier: str, calls: int) -> None:
    words = exact(tmp_path)
    if sparsifier == "micro":
        words += [f"schedule.select={tmp_path / 'select.json'}", "schedule=sparse_exact", "sparsifier=micro"]
    done = trained(*words, f"output={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr
    folder, found = num_collectives(tmp_path / "runs")
    plan = Plan.load(folder / "plan.json")  # the run itself checks DDP's buckets against it, in its second step
    assert len(plan.groups) > 1
    assert min(found[2:]) == calls * len(plan.groups)  # more where MiCRO searches for its threshold


@pytest.mark.dist
@pytest.mark.parametrize(("schedule", "num_buckets"), [("layerwise", 23), ("single", 1)])
def test_schedules_without_a_plan_make_their_buckets(tmp_path: Path, schedule: str, num_buckets: int) -> None:
    done = trained(*WORDS, f"schedule={schedule}", "sparsifier=dense", f"output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert num_collectives(tmp_path)[1][-1] == num_buckets


@pytest.mark.dist
def test_a_model_that_computes_in_another_order_than_its_trace_is_stopped(tmp_path: Path) -> None:
    done = trained(*exact(tmp_path, turned=True), f"output={tmp_path / 'runs'}")
    assert done.returncode == 1
    assert "backward does not follow the plan: bucket 0 differs by" in done.stderr
    assert "profile this model again" in done.stderr


def share_plan(words: list[str], widths: list[int]) -> tuple[str | None, str | None]:
    """Return the digest of the agreed plan, or the words of the refusal; a rank may hold a model of its own width."""
    (config,) = prepare_runs([words])
    comm = GroupComm()
    model = model_of(config)
    model.extra = nn.Linear(1, widths[comm.rank]) if widths[comm.rank] else nn.Identity()
    try:
        plan = agreed_plan(config, model, comm)
    except UserError as error:
        return None, str(error)
    return (plan.digest if plan else None), None


@pytest.mark.dist
def test_all_ranks_hold_rank_0s_plan_and_a_rank_with_another_model_stops_all_of_them(tmp_path: Path) -> None:
    words = exact(tmp_path)
    first, second = ranks(2).run(share_plan, words, [0, 0])
    assert first == second
    assert first[0] is not None
    for widths, by in (([0, 3], "rank 1: "), ([3, 0], "")):
        for digest, refusal in ranks(2).run(share_plan, words, widths):
            assert digest is None
            assert refusal.startswith(by)
            assert "'extra.weight'" in refusal


def test_a_grouping_that_differs_from_the_plan_is_reported() -> None:
    plan = Plan(schedule="exact", groups=(("a", "b"), ("c",)), num_bytes=(8, 4))
    check_buckets(plan, [("b", "a"), ("c",)])
    for buckets in ([("a",), ("b", "c")], [("a", "b", "c")], [("a", "b")]):
        with pytest.raises(UserError, match="profile this model again"):
            check_buckets(plan, buckets)


@pytest.mark.parametrize(
    ("words", "key", "given"),
    [
        (("schedule=exact", "link", "sparsifier=dense"), "schedule.trace", NOTHING),
        (("schedule=layerwise", "trace", "link", "sparsifier=dense"), "schedule.trace", NOTHING),
        (("schedule=single", "cluster=simulated"), "schedule=single", NOTHING),
        (("schedule=exact", "trace", "link", "select", "cluster.nproc_per_node=3"), "2 workers", 3),
        (("schedule=exact", "trace", "link", "model=mlp", "model.settings={hidden: 4}"), "another model", NOTHING),
        (("schedule=sparse_exact", "trace", "link", "select", "sparsifier=topk"), "micro", "topk"),
        (("sparsifier=dense", "scope=tensor"), "dense", NOTHING),
        (("scope=layer",), "scope", "'layer'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_a_worker_starts(
    tmp_path: Path, words: tuple[str, ...], key: str, given: object
) -> None:
    files = measured(tmp_path)
    refused(lambda: prepare_runs([[*WORDS, *(files.get(word, word) for word in words)]]), key, given, error=UserError)


@pytest.mark.parametrize("broken", ["{", '{"format": "micro-link-1"}'])
def test_a_torn_or_foreign_file_is_refused_by_its_name(tmp_path: Path, broken: str) -> None:
    words = exact(tmp_path)
    (tmp_path / "trace.json").write_text(broken)
    refused(lambda: prepare_runs([words]), f"{tmp_path / 'trace.json'}", error=UserError)
