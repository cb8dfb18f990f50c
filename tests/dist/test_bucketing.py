"""From a schedule to DDP's buckets: a plan of rank 0, agreed on and carried out; what does not fit is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.config.builders import build_model
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.training.bucketing import agreed_plan, check_buckets, gradient_bytes
from experiments.training.preflight import prepare_runs
from micro.group_comm import GroupComm
from micro.planning.schedules.base import Plan
from micro.planning.tables import Curve, LinkTable, SelectTable
from micro.planning.traces import Layer, Trace
from tests.dist.processes import ranks
from tests.dist.rank_functions import Ended, train

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


def measured(folder: Path, *, world_size: int = 2, turned: bool = False) -> dict[str, Path]:
    """Write files as the profiler does: the real order of ResNet-8's gradients, one millisecond each."""
    (config,) = prepare_runs([list(WORDS)])
    model = model_of(config)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    sizes = gradient_bytes(model)
    if turned:
        order.reverse()
    layers = tuple(Layer(name, sizes[name], MS * (1 + place)) for place, name in enumerate(order))
    trace = Trace(model="resnet8", layers=layers, forward_s=10 * MS, backward_s=len(order) * MS)
    line = Curve(sizes=(0.0, 1e6), seconds=(MS / 2, 100 * MS))
    link = LinkTable(
        world_size=world_size, collectives=dict.fromkeys(("all_reduce", "gather_rows", "gather_lists"), line)
    )
    select = SelectTable(world_size=2, density=0.01, methods={"micro": Curve(sizes=(0.0, 1e6), seconds=(MS / 10, MS))})
    files = {name: folder / f"{name}.json" for name in ("trace", "link", "select")}
    trace.save(files["trace"])
    link.save(files["link"])
    select.save(files["select"])
    return files


def words_with(files: dict[str, Path], *more: str, schedule: str = "exact") -> list[str]:
    return [*WORDS, f"schedule={schedule}", *(f"schedule.{key}={path}" for key, path in files.items()), *more]


def trained(*words: str) -> Ended:
    """Train with the shared ranks, which join as those of torchrun do, and return how rank 0 ended."""
    ended: list[Ended] = ranks(2).run_apart(train, *words)
    assert len({each.returncode for each in ended}) == 1, ended
    return ended[0]


@pytest.mark.dist
@pytest.mark.parametrize("sparsifier", ["dense", "micro"])
def test_a_training_runs_in_the_planned_buckets(tmp_path: Path, sparsifier: str) -> None:
    files = measured(tmp_path)
    schedule = "sparse_exact" if sparsifier == "micro" else "exact"
    if sparsifier == "dense":
        del files["select"]
    output = tmp_path / "runs"
    done = trained(*words_with(files, f"sparsifier={sparsifier}", f"output={output}", schedule=schedule))
    assert done.returncode == 0, done.stderr
    (folder,) = output.iterdir()
    plan = Plan.load(folder / "plan.json")  # the run itself checks DDP's buckets against it, in its second step
    assert len(plan.groups) > 1
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    calls = {"dense": 1, "micro": 3}[sparsifier] * len(plan.groups)
    assert min(row["num_collectives"] for row in rows[2:]) == calls  # more where MiCRO searches for its threshold


@pytest.mark.dist
@pytest.mark.parametrize(("schedule", "num_buckets"), [("layerwise", 23), ("single", 1)])
def test_schedules_without_a_plan_make_their_buckets(tmp_path: Path, schedule: str, num_buckets: int) -> None:
    done = trained(*WORDS, f"schedule={schedule}", "sparsifier=dense", f"output={tmp_path}")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert rows[-1]["num_collectives"] == num_buckets


@pytest.mark.dist
def test_a_model_that_computes_in_another_order_than_its_trace_is_stopped(tmp_path: Path) -> None:
    files = measured(tmp_path, turned=True)
    del files["select"]
    done = trained(*words_with(files, "sparsifier=dense", f"output={tmp_path / 'runs'}"))
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
def test_all_ranks_hold_rank_0s_plan(tmp_path: Path) -> None:
    files = measured(tmp_path)
    del files["select"]
    answers = ranks(2).run(share_plan, words_with(files, "sparsifier=dense"), [0, 0])
    assert answers[0] == answers[1]
    assert answers[0][0] is not None


@pytest.mark.dist
@pytest.mark.parametrize(("widths", "by"), [([0, 3], "rank 1: "), ([3, 0], "")])
def test_a_rank_with_another_model_stops_all_of_them(tmp_path: Path, widths: list[int], by: str) -> None:
    files = measured(tmp_path)
    del files["select"]
    for digest, words in ranks(2).run(share_plan, words_with(files, "sparsifier=dense"), widths):
        assert digest is None
        assert words is not None
        assert words.startswith(by)
        assert "'extra.weight'" in words


def test_another_grouping_than_planned_is_told() -> None:
    plan = Plan(schedule="exact", groups=(("a", "b"), ("c",)), num_bytes=(8, 4))
    check_buckets(plan, [("b", "a"), ("c",)])
    for buckets in ([("a",), ("b", "c")], [("a", "b", "c")], [("a", "b")]):
        with pytest.raises(UserError, match="profile this model again"):
            check_buckets(plan, buckets)


def refusal(words: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        prepare_runs([words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("schedule=exact", "schedule.link=LINK", "sparsifier=dense"), ("schedule.trace",)),
        (("schedule=layerwise", "FILES", "sparsifier=dense"), ("schedule.trace",)),
        (("schedule=dear",), ("dear", "DDP")),
        (("schedule=single", "cluster=simulated"), ("schedule=single",)),
        (("schedule=exact", "FILES", "cluster.nproc_per_node=3"), ("2 workers", "3")),
        (("schedule=exact", "FILES", "model=mlp", "model.settings={hidden: 4}"), ("another model",)),
        (("schedule=sparse_exact", "FILES", "sparsifier=topk"), ("micro", "topk")),
        (("sparsifier=dense", "scope=tensor"), ("dense",)),
        (("scope=layer",), ("scope", "'layer'")),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_a_worker_starts(
    tmp_path: Path, words: tuple[str, ...], keys: tuple[str, ...]
) -> None:
    files = measured(tmp_path)
    given = [f"schedule.{key}={path}" for key, path in files.items()] if "FILES" in words else []
    given += [word.replace("LINK", str(files["link"])) for word in words if word != "FILES"]
    said = refusal([*WORDS, *given])
    assert all(key in said for key in keys), said


@pytest.mark.parametrize("broken", ["{", '{"format": "micro-link-1"}'])
def test_a_torn_or_foreign_file_is_refused_by_its_name(tmp_path: Path, broken: str) -> None:
    files = measured(tmp_path)
    del files["select"]
    files["trace"].write_text(broken)
    assert str(files["trace"]) in refusal(words_with(files, "sparsifier=dense"))
