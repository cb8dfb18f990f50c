"""Optimizers for sparse updates: what arrived for each element, AdamW where all of it does, and what a wait changes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.drivers.arrivals import arrival_of
from micro.optim.waits import LONGEST, in_shape_of
from tests.products import grid
from tests.sharded_models import attach as attach_sharded
from tests.sharded_models import sharded
from tests.small_models import TwoHeads, backward, batch, local, wrapped
from tests.sparsifiers import TABLE, Row

TOPK = micro.SparseReducer(micro.TopK(), density=0.2)
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Oracle:
    """SparseAdamW of one parameter, element by element as its description says, in double precision."""

    def __init__(self, parameter: Tensor, max_steps: float = 20) -> None:
        self.weights, self.max_steps, self.step_ = local(parameter.detach()).double().clone(), max_steps, 0
        self.first, self.second, self.waited = (torch.zeros_like(self.weights) for _ in range(3))

    def step(self, grad: Tensor, came: Tensor) -> None:
        (beta1, beta2), lr = SETTINGS["betas"], SETTINGS["lr"]
        self.step_ += 1
        self.waited += 1
        self.weights *= 1 - lr * SETTINGS["weight_decay"]
        tau = self.waited[came]
        mean, keep1, keep2 = grad[came].double() / tau, beta1**tau, beta2**tau
        self.first[came] = keep1 * self.first[came] + (1 - keep1) * mean
        self.second[came] = keep2 * self.second[came] + (1 - keep2) * mean**2
        first = self.first[came] / (1 - beta1**self.step_)
        root = (self.second[came] / (1 - beta2**self.step_)).sqrt()
        self.weights[came] -= lr * tau.clamp(max=self.max_steps) * first / (root + 1e-8)
        self.waited[came] = 0


def came(parameter: Tensor) -> Tensor:
    """Return where something came for this parameter, in its shape."""
    arrival = arrival_of(parameter)
    assert arrival is not None
    return in_shape_of(local(parameter), arrival.mask())


def check(model: nn.Module, oracles: dict[str, Oracle]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(local(parameter.detach()).double(), oracles[name].weights, rtol=1e-4, atol=1e-6)


# --- what arrived -----------------------------------------------------------------------------------------------------


@grid(row=TABLE)
def test_arrivals_are_equal_on_all_ranks_and_include_every_update(row: Row) -> None:
    world_size = row.world_size(2)
    layout = micro.Layout(("a", "b"), ((16, 20), (57,)))
    simulation = micro.Simulation(row.make(0.2, 0), layout, world_size)
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        found = simulation.step(torch.randn(world_size, layout.numel, generator=draw))
        masks = [state.latest.arrived and state.latest.arrived() for state in simulation._states]
        if masks[0] is None:
            assert masks == [None] * world_size
            continue
        assert all(torch.equal(mask, masks[0]) for mask in masks)
        assert not found.update[~masks[0]].any()
        assert int(masks[0].sum()) <= found.stats[0].global_count


def test_a_step_that_was_skipped_brings_nothing_and_a_split_brings_all_that_is_dense() -> None:
    layout = micro.Layout(("a", "b"), ((8, 10), (6,)))
    reducer = micro.Split(reducer=micro.SparseReducer(micro.TopK(), density=0.1, nonfinite="skip"), dense="b")
    simulation, rows = micro.Simulation(reducer, layout, 2), torch.ones(2, layout.numel)
    stats = simulation.step(rows.cumsum(1)).stats[0]
    assert simulation.arrived is not None
    assert simulation.arrived()[80:].all()
    assert int(simulation.arrived().sum()) == stats.global_count < 80
    rows[1, 3] = float("nan")
    simulation.step(rows)
    assert simulation.arrived is not None
    assert not simulation.arrived().any()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("scope", ["bucket", "tensor", "model"])
def test_ddp_notes_what_left_the_residual_also_of_weights_whose_memory_has_another_order(scope: str) -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
    model = wrapped(body, gradient_as_bucket_view=True)
    attachment = micro.attach(model, TOPK, scope=scope)
    for step in range(3):
        model.zero_grad()
        inputs = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        for parameter in body.parameters():
            assert parameter.grad is not None
            assert not parameter.grad[~came(parameter)].any()
            assert parameter.grad[came(parameter)].all()
        num_updated = sum(stats.global_count for stats in attachment.stats)
        assert sum(int(came(p).sum()) for p in body.parameters()) == num_updated
    attachment.close()
    arrivals = [arrival_of(p) for p in body.parameters()]
    assert all(arrival is not None and arrival.is_whole for arrival in arrivals)


@pytest.mark.usefixtures("one_rank")
def test_a_layer_of_two_attached_models_has_what_the_last_backward_sent() -> None:
    """As of a GAN whose halves share a layer: each model's residual sends other elements of it."""
    shared = nn.Linear(4, 4)
    models = [wrapped(nn.Sequential(shared, nn.Linear(4, width))) for width in (2, 3)]
    for model in models:
        micro.attach(model, TOPK)
    for step in range(6):
        model = models[step % 2]
        model.zero_grad()
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        assert shared.weight.grad is not None
        assert torch.equal(came(shared.weight), shared.weight.grad != 0), step


# --- all of it arrives: AdamW -----------------------------------------------------------------------------------------


class Words(nn.Module):
    """A table; a batch uses a few rows, and the gradients of the others are true zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(12, 4), nn.Linear(4, 3)

    def forward(self, step: int) -> Tensor:
        words: Tensor = self.table(torch.tensor([step % 12, 3, (5 * step) % 12]))
        return self.last(words).square().sum()


DENSE: dict[str, micro.Reducer] = {
    "dense": micro.DenseReducer(),
    "density 1": micro.SparseReducer(micro.Micro(), density=1.0),
    "powersgd": micro.PowerSGD(),
    "qsgd": micro.SparseReducer(
        micro.Everything(), density=1.0, exchange=micro.Gather(), codec=micro.QSGD(), feedback=micro.NoFeedback()
    ),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"foreach": False, "maximize": True}])
def test_where_every_element_comes_it_is_adamw_bit_for_bit(name: str, settings: dict[str, Any]) -> None:
    model = wrapped(Words())
    with micro.attach(model, DENSE[name]):
        check_equals_adamw(model, lambda step: model(step).backward(), **settings)


def check_equals_adamw(model: nn.Module, backward: Callable[[int], object], **settings: Any) -> None:
    twins = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = micro.SparseAdamW(model.parameters(), **SETTINGS, **settings)
    expected = torch.optim.AdamW(twins, **SETTINGS, **settings)
    for step in range(5):
        optimizer.zero_grad()
        backward(step)
        for parameter, twin in zip(model.parameters(), twins, strict=True):
            twin.grad = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
        expected.step()
    assert all(torch.equal(p, twin) for p, twin in zip(model.parameters(), twins, strict=True))
    assert all("waited" not in state for state in optimizer.state.values())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_steps_are_adamws_because_their_gradients_are_whole(dtype: torch.dtype) -> None:
    model, twin = Words().to(dtype), Words().to(dtype)
    found = []
    for each, kind in ((model, micro.SparseAdamW), (twin, torch.optim.AdamW)):
        optimizer = kind(each.parameters(), **SETTINGS)
        with micro.LocalSteps(each, optimizer, TOPK, every=2):
            for step in range(4):
                optimizer.zero_grad()
                each(step).backward()
                optimizer.step()
        found.append(list(each.parameters()))
    assert all(map(torch.equal, *found))


# --- elements wait ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("change", ["nothing", "clip", "noise", "micro-batches", "unused"])
def test_a_wait_is_made_up_for_whatever_the_loop_does_to_gradients_after_the_exchange(change: str) -> None:
    model = wrapped(TwoHeads(), find_unused_parameters=True)
    micro.attach(model, TOPK)
    optimizer = micro.SparseAdamW(model.parameters(), **SETTINGS, max_steps=4)
    oracles = {name: Oracle(p, max_steps=4) for name, p in model.named_parameters()}
    for step in range(12):
        optimizer.zero_grad()
        if change == "micro-batches":
            with model.no_sync():
                backward(model, 100 + step)
        backward(model, step, both=change != "unused" or step % 3 > 0)
        present = {name: p for name, p in model.named_parameters() if p.grad is not None}
        if change == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for name, parameter in present.items():
            assert parameter.grad is not None
            if change == "noise":
                parameter.grad += 0.1
            oracles[name].step(parameter.grad, came(parameter))
        optimizer.step()
        check(model, oracles)
    assert any(oracle.waited.max() > 4 for oracle in oracles.values())
    assert ("module.second.weight" in present) is True


@pytest.mark.usefixtures("one_rank")
def test_shards_of_fsdp_wait_as_whole_tensors_do() -> None:
    model = sharded()
    attach_sharded(model, TOPK)
    optimizer = micro.SparseAdamW(model.parameters(), **SETTINGS)
    oracles = {name: Oracle(p) for name, p in model.named_parameters()}
    for step in range(6):
        optimizer.zero_grad()
        backward(model, step)
        for name, parameter in model.named_parameters():
            oracles[name].step(local(parameter.grad), came(parameter))
        optimizer.step()
    check(model, oracles)
    again = micro.SparseAdamW(model.parameters(), **SETTINGS)
    again.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        counts, loaded = (local(each.state[parameter]["waited"]) for each in (optimizer, again))
        assert torch.equal(counts, loaded)
        assert loaded.dtype == torch.int16


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("scaled", [False, True])
def test_in_a_step_that_is_not_finite_elements_wait_on(scaled: bool) -> None:
    model, scaler = wrapped(TwoHeads()), torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    reducer = micro.SparseReducer(micro.TopK(), density=0.2, nonfinite="skip")
    attachment = micro.attach(model, reducer, scaler=scaler)
    optimizer = micro.SparseAdamW(model.parameters(), **SETTINGS | {"weight_decay": 0.0})
    waits = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(step)).square().sum() * (float("inf") if step == 2 else 1.0)
        before = [p.detach().clone() for p in model.parameters()]
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        waits.append(torch.cat([optimizer.state[p]["waited"].flatten() for p in model.parameters()]).clone())
        if step == 2:
            assert attachment.skipped
            assert all(map(torch.equal, before, model.parameters()))
    # a scaler leaves the optimizer's step out, which then is not counted
    assert torch.equal(waits[2], waits[1] if scaled else waits[1] + 1)
    assert not torch.equal(waits[3], waits[2] + 1)


@pytest.mark.usefixtures("one_rank")
def test_after_a_density_warm_up_elements_begin_to_wait_and_when_all_come_again_nothing_is_left_of_it() -> None:
    model = wrapped(TwoHeads())
    density = micro.WarmUp(density=0.2, start_density=1.0, steps=2)
    attachment = micro.attach(model, micro.SparseReducer(micro.TopK(), density=density))
    optimizer = micro.SparseAdamW(model.parameters(), **SETTINGS)
    waiting = []
    for step in range(5):
        if step == 4:
            attachment.close()
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        waiting.append(any("waited" in state for state in optimizer.state.values()))
    assert waiting == [False, True, True, True, False] or waiting == [False, False, True, True, False]


@pytest.mark.usefixtures("one_rank")
def test_a_resumed_training_has_the_same_bits() -> None:
    def start() -> tuple[DistributedDataParallel, Any, micro.SparseAdamW]:
        model = wrapped(TwoHeads())
        return model, micro.attach(model, TOPK), micro.SparseAdamW(model.parameters(), **SETTINGS)

    def train(model: DistributedDataParallel, optimizer: micro.SparseAdamW, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()

    model, attachment, optimizer = start()
    train(model, optimizer, range(4))
    saved = copy.deepcopy([model.state_dict(), attachment.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(4, 8))
    again = start()
    for each, state in zip(again, saved, strict=True):
        each.load_state_dict(state)
    train(again[0], again[2], range(4, 8))
    assert all(map(torch.equal, model.parameters(), again[0].parameters()))


def test_an_unattached_parameter_waits_where_its_gradient_is_zero_and_all_kinds_of_memory_agree() -> None:
    draw = torch.Generator().manual_seed(0)
    weights, twin = torch.randn(6, 10, generator=draw), None
    for shape in ("whole", "in columns", "few"):
        parameter = nn.Parameter((weights.T.contiguous().T if shape == "in columns" else weights).clone())
        oracle, optimizer = Oracle(parameter), micro.SparseAdamW([parameter], **SETTINGS)
        for step in range(20):
            share = 0.05 if shape == "few" else 0.5
            noise = torch.randn(6, 10, generator=torch.Generator().manual_seed(step))
            grad = noise * (torch.rand(6, 10, generator=torch.Generator().manual_seed(step)) < share)
            parameter.grad = grad.clone()
            oracle.step(grad, grad != 0)
            optimizer.step()
        torch.testing.assert_close(parameter.detach().double(), oracle.weights, rtol=1e-4, atol=1e-6)
        if shape != "few":
            twin = parameter.detach().clone() if twin is None else twin
            torch.testing.assert_close(parameter.detach(), twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_counts_stay_whole_numbers_of_two_bytes_that_stop_at_the_largest(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = micro.SparseAdamW([parameter], **SETTINGS)
    parameter.grad = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype)
    for _ in range(300):
        optimizer.step()
    again = micro.SparseAdamW([parameter], **SETTINGS)
    again.load_state_dict(optimizer.state_dict())
    assert again.state[parameter]["waited"].tolist() == [0, 300, 300, 300]
    assert again.state[parameter]["waited"].dtype == torch.int16
    again.state[parameter]["waited"].fill_(LONGEST - 1)
    for _ in range(3):
        again.step()
    assert again.state[parameter]["waited"].tolist() == [0, *[LONGEST] * 3]
    assert parameter.isfinite().all()


def test_a_state_of_adamw_is_taken_over() -> None:
    parameter, twin = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    before, expected = (torch.optim.AdamW([each], **SETTINGS) for each in (parameter, twin))
    optimizer = micro.SparseAdamW([parameter], **SETTINGS)
    for step in range(6):
        for each in (parameter, twin):
            each.grad = torch.arange(3.0) + step + 1
        if step == 3:
            optimizer.load_state_dict(before.state_dict())
        (before if step < 3 else optimizer).step()
        expected.step()
    torch.testing.assert_close(parameter, twin)
    parameter.grad = torch.tensor([0.0, 0.0, 1.0])  # two elements wait
    optimizer.step()
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.load_state_dict(torch.optim.AdamW([twin], amsgrad=True).state_dict())


def test_signs_take_the_steps_of_a_wait_up_to_the_most_and_one_step_without_a_wait() -> None:
    ends = []
    for max_steps in (1, 3, 100):
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = micro.SignSGD([parameter], lr=0.01, max_steps=max_steps)
        for step in range(1, 11):
            parameter.grad = torch.tensor([-5.0 * (step == 10), 0.1])
            optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(torch.stack(ends), torch.tensor([[0.01, -0.1], [0.03, -0.1], [0.1, -0.1]]))


def test_a_state_of_signs_without_max_steps_is_loaded_as_one_step() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = micro.SignSGD([parameter], lr=0.01)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["max_steps"]
    optimizer.load_state_dict(saved)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.tolist() == pytest.approx([-0.01, -0.01])


# --- laws, and what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [3, 10, 40])
def test_constant_gradients_that_wait_end_where_adamw_ends(tau: int) -> None:
    ends = []
    for wait in (1, tau):
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = micro.SparseAdamW([parameter], lr=0.01, weight_decay=0.0, max_steps=50)
        for step in range(1, 6 * tau + 1):
            parameter.grad = torch.tensor([3.0, -0.2]) * (wait if step % wait == 0 else 0)
            optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(*ends, rtol=1e-3, atol=0)
