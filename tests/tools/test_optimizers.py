"""Optimizers' rules against what they say, and options of a run against the run without them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import micro
from experiments.config.builders import build_reducer
from experiments.config.schema import OptimizerConfig
from experiments.training.optimizers import build_optimizer, learning_rate, set_lr_
from tests.refusals import refused
from tests.tools.simulated_runs import IMAGES, Run, configured


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        self.block = nn.ModuleDict({"conv1": nn.Conv2d(2, 2, 1), "bn1": nn.BatchNorm2d(2)})


def steps_of(config: OptimizerConfig, gradients: list[float], lr: float = 0.1, start: float = 1.0) -> list[float]:
    weight = nn.Parameter(torch.tensor([[start]], dtype=torch.float64))
    model = nn.Module()
    model.weight = weight
    optimizer = build_optimizer(config, model, lr)
    seen = []
    for gradient in gradients:
        set_lr_(optimizer, config, lr)
        weight.grad = torch.full_like(weight, gradient * (lr if config.scales_gradients else 1.0))
        optimizer.step()
        seen.append(weight.item())
    return seen


def test_published_nesterov_steps_by_gradient_plus_velocity() -> None:
    config = OptimizerConfig(name="sgd", momentum=0.9, nesterov="published", weight_decay=0.01)
    weight, velocity, expected = 1.0, 0.0, []
    for gradient in (0.5, -0.2, 0.3):
        gradient += 0.01 * weight
        velocity = 0.9 * velocity + gradient
        weight -= 0.1 * (gradient + velocity)
        expected.append(weight)
    assert steps_of(config, [0.5, -0.2, 0.3]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("nesterov", ["none", "pytorch", "published"])
def test_lr_at_decides_where_the_rate_enters_and_does_not_change_a_dense_run(nesterov: str) -> None:
    common = {"name": "sgd", "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.05}
    outside, inside = (
        steps_of(OptimizerConfig(**common, lr_at=place), [0.5, -0.2, 0.3]) for place in ("update", "gradient")
    )
    assert inside == pytest.approx(outside, rel=1e-12)


INNER = {"block.bn1.weight", "block.bn1.bias"}


@pytest.mark.parametrize(
    ("decay_of", "free"),
    [
        ("all", set()),
        ("weights", {"stem.0.bias", "stem.1.weight", "stem.1.bias", "block.conv1.bias", *INNER}),
        ("published", INNER),
    ],
)
def test_weight_decay_is_of_what_it_says(decay_of: str, free: set[str]) -> None:
    model = Net()
    config = OptimizerConfig(name="sgd", weight_decay=0.1, decay_of=decay_of)
    groups = build_optimizer(config, model, 0.1).param_groups
    without = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    assert {name for name, p in model.named_parameters() if id(p) in without} == free
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_momentum_before_the_residual_is_momentum_correction(tmp_path: Path) -> None:
    words = ["sparsifier=topk", "optimizer.momentum_at=gradient", "optimizer.nesterov=pytorch"]
    reducer = build_reducer(configured(tmp_path, *IMAGES, *words))
    assert isinstance(reducer, micro.SparseReducer)
    assert reducer.feedback == micro.MomentumCorrection(momentum=0.9, nesterov=True)
    unbiased = [*IMAGES, *words[:2], "sparsifier=randomk_unbiased"]
    refused(lambda: configured(tmp_path, *unbiased), "optimizer.momentum_at", "none")


def test_two_half_batches_make_the_step_of_one(tmp_path: Path) -> None:
    """The samples of a step are the same; which worker has them is not."""
    words = ["model=mlp", "dataset=synthetic", "dataset.settings.num_samples=128", "epochs=1", "sparsifier=dense"]
    whole, halves = (
        Run(configured(tmp_path, *words, *more)) for more in (["batch_size=16"], ["batch_size=8", "accumulate=2"])
    )
    assert halves.trainer.position.step == whole.trainer.position.step == 2
    assert halves.row
    assert whole.row
    assert halves.row["test_loss"] == pytest.approx(whole.row["test_loss"], rel=1e-4)


@pytest.fixture
def without_code_generation() -> Iterator[None]:
    """Let torch.compile trace the model and its gradient, and not wait for a C++ compiler, which is PyTorch's part."""
    if not hasattr(torch.compiler, "set_default_backend"):
        pytest.skip("torch.compile has no default to set")
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("aot_eager")
    yield
    torch.compiler.set_default_backend(before)


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(
    ("option", "model"), [("precision=bfloat16", "resnet8"), ("channels_last=true", "resnet8"), ("compile=true", "mlp")]
)
def test_options_train_like_the_plain_run(tmp_path: Path, option: str, model: str) -> None:
    words = [*IMAGES, f"model={model}", "sparsifier=micro", "epochs=1"]
    plain, changed = Run(configured(tmp_path, *words)), Run(configured(tmp_path, *words, option))
    assert plain.row is not None
    assert changed.row is not None
    assert changed.row["train_loss"] == pytest.approx(plain.row["train_loss"], rel=0.05)
    if option == "precision=bfloat16":
        assert changed.digest != plain.digest


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.widen = nn.Linear(4, 6)


def stepped(model: nn.Module, optimizers: list[torch.optim.Optimizer], gradients: list[list[torch.Tensor]]) -> None:
    for of_step in gradients:
        for parameter, gradient in zip(model.parameters(), of_step, strict=True):
            parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()


def test_muon_steps_hidden_matrices_and_adamw_all_else_also_from_a_saved_state() -> None:
    config = OptimizerConfig(name="muon", weight_decay=0.1, betas=[0.9, 0.95])
    ours, theirs = Words(), Words()
    gradients = [[torch.randn_like(p) for p in ours.parameters()] for _ in range(4)]
    adamw = torch.optim.AdamW(
        [theirs.embedding.weight, theirs.widen.bias], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1
    )
    muon = torch.optim.Muon([theirs.widen.weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    stepped(theirs, [muon, adamw], gradients)
    first = build_optimizer(config, ours, 0.02)
    stepped(ours, [first], gradients[:2])
    resumed = build_optimizer(config, ours, 0.02)
    resumed.load_state_dict(first.state_dict())
    stepped(ours, [resumed], gradients[2:])
    for own, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, expected)


def test_sign_moves_every_weight_by_the_rate_and_decays_it_apart() -> None:
    config = OptimizerConfig(name="sign", weight_decay=0.5)
    assert steps_of(config, [0.3, -7.0, 0.0], lr=0.1) == pytest.approx(
        [0.85, 0.85 * 0.95 + 0.1, (0.85 * 0.95 + 0.1) * 0.95]
    )
    refused(lambda: micro.SignSGD([], lr=-1.0), "lr of SignSGD", -1.0)


def test_the_rate_follows_its_shape(tmp_path: Path) -> None:
    words = [*IMAGES, "epochs=10", "lr=1", "lr_warmup_epochs=2", "lr_warmup_start=0.5"]
    steps = configured(tmp_path, *words, "lr_milestones=[5]")
    assert [learning_rate(steps, epoch) for epoch in (0, 1, 2, 4.9, 5)] == pytest.approx([0.5, 0.75, 1, 1, 0.1])
    linear = configured(tmp_path, *words, "lr_shape=linear")
    assert [learning_rate(linear, epoch) for epoch in (2, 6, 10)] == pytest.approx([1, 0.5, 0])
    cosine = configured(tmp_path, *words, "lr_shape=cosine")
    assert [learning_rate(cosine, epoch) for epoch in (2, 6, 10)] == pytest.approx([1, 0.5, 0], abs=1e-9)
