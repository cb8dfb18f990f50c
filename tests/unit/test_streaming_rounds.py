"""Local steps whose fragments are exchanged one after another, beside the next steps: laws and brute force."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import micro
from micro.comm import Comm
from micro.local.exchange import Exchange
from micro.local.splitting import split
from tests.local_training import ADAM, SGD, SPARSE, assert_same, backward, flat, network, on_ranks, trained
from tests.refusals import refused
from tests.saving import through_a_file

NESTEROV = micro.Outer(lr=0.7, momentum=0.9, nesterov=True)
BY_NAME = ["a.*", ["b.weight", "b.bias"]]
EVERY, STEPS = 4, 11


class Reference:
    """Streaming of one fragment, spelled out: tensors of all workers side by side, Nesterov's step outside."""

    def __init__(self, parameters: list[list[Tensor]], phase: int, delay: int, mix: float) -> None:
        self.parameters, self.phase, self.delay, self.mix = parameters, phase, delay, mix
        self.start = [p.detach().clone() for p in parameters[0]]
        self.velocity = [torch.zeros_like(p) for p in self.start]
        self.due: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def after(self, step: int) -> None:
        if step % EVERY == self.phase % EVERY:
            own = [torch.stack([worker[i] for worker in self.parameters]) for i in range(len(self.start))]
            self.due[step + self.delay] = [start - rows.mean(0) for start, rows in zip(self.start, own, strict=True)]
        for i, update in enumerate(self.due.pop(step, [])):
            self.velocity[i] = 0.9 * self.velocity[i] + update
            self.start[i] = self.start[i] - 0.7 * (update + 0.9 * self.velocity[i])
            for worker in self.parameters:
                worker[i].copy_((1 - self.mix) * worker[i] + self.mix * self.start[i])


@pytest.mark.parametrize(
    ("fragments", "delay", "mix"), [(1, 2, 1.0), (BY_NAME, 0, 1.0), (BY_NAME, 1, 0.5), (BY_NAME, 3, 0.25)]
)
def test_streaming_is_the_outer_step_of_each_fragment_late_and_mixed(fragments: Any, delay: int, mix: float) -> None:
    models = [network() for _ in range(3)]
    optimizers = [ADAM(model.parameters()) for model in models]
    pieces = [list(model.parameters()) for model in models]
    of_each = [(0, 4)] if fragments == 1 else [(0, 2), (2, 4)]
    references = [
        Reference([piece[first:last] for piece in pieces], (number + 1) * EVERY // len(of_each), delay, mix)
        for number, (first, last) in enumerate(of_each)
    ]
    expected = []
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, step, rank)
            optimizer.step()
        for reference in references:
            reference.after(step + 1)
        expected.append([flat(model) for model in models])
    settings = {"every": EVERY, "outer": NESTEROV, "fragments": fragments, "delay": delay, "mix": mix}
    found = trained(3, STEPS, micro.DenseReducer(), ADAM, **settings)
    for step in range(STEPS):
        for rank in range(3):
            torch.testing.assert_close(found[rank][step], expected[step][rank], rtol=1e-11, atol=1e-12)


def test_each_fragment_is_exchanged_at_its_own_step_and_sends_its_share() -> None:
    model, begun = network(), list[tuple[int, int, float]]()

    def work(comm: Comm) -> tuple[list[bool], float]:
        own = network() if comm.rank else model
        optimizer, due = SGD(own.parameters()), []
        settings: dict[str, Any] = {"every": 6, "fragments": 3, "delay": 1, "comm": comm}
        with micro.LocalSteps(own, optimizer, micro.DenseReducer(), **settings) as local:
            local.on_round = None if comm.rank else lambda s: begun.append((local.num_steps, s.fragment, s.bytes_sent))
            for step in range(13):
                due.append(local.ranks_meet_next)
                backward(own, step, comm.rank)
                optimizer.step()
            assert local.num_rounds == 2
            local.finish()
            return due, local.steps_in_round

    due, place = on_ranks(2, work)[0]
    assert due == [False] + [True] * 12  # each exchange ends with the step after the one in which it began
    assert place == 0
    assert [(step, fragment) for step, fragment, _ in begun[:6]] == [(3, 0), (5, 1), (7, 2), (9, 0), (11, 1), (13, 2)]
    assert [fragment for _, fragment, _ in begun[6:]] == [0, 1], "the last moved with the step that ended its exchange"
    sizes = [sum(p.numel() for p in part.values()) for part in split(dict(model.named_parameters()), 3)]
    assert sum(sizes) == flat(model).numel()
    assert max(sizes) == 30, "of 50 elements 30 are in one matrix"
    assert [sent for *_, sent in begun[:3]] == [8.0 * size for size in sizes]  # a ring of two ranks, float64


def test_weights_are_equal_after_the_end_whatever_was_under_way() -> None:
    models = [network() for _ in range(3)]

    def work(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        model = models[comm.rank]
        optimizer = ADAM(model.parameters())
        settings: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 3, "mix": 0.5, "comm": comm}
        with micro.LocalSteps(model, optimizer, SPARSE, **settings) as local:
            for step in range(5):
                backward(model, step, comm.rank)
                optimizer.step()
            with local.global_weights():
                within = flat(model)
            own = flat(model)
            local.finish()
            return within, own, flat(model)

    found = on_ranks(3, work)
    assert not torch.equal(found[0][1], found[1][1])
    for within, _, end in found:
        assert torch.equal(within, found[0][0])
        assert torch.equal(end, found[0][2])


STREAMING: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 2, "mix": 0.5}
AT_ONCE: dict[str, Any] = {"every": 3, "outer": micro.Outer(lr=0.9)}


@pytest.mark.parametrize(
    ("reducer", "settings"),
    [
        (SPARSE, STREAMING),
        (micro.DenseReducer(), STREAMING),
        (micro.SparseReducer(micro.Micro(), 0.2), AT_ONCE),
        (micro.DenseReducer(), AT_ONCE | {"outer": NESTEROV}),
        (micro.PowerSGD(rank=1), AT_ONCE),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit_with_an_exchange_under_way_too(
    reducer: micro.Reducer, settings: dict[str, Any]
) -> None:
    def run(saved: list[Any] | None, steps: range) -> list[Any]:
        def work(comm: Comm) -> Any:
            model, ended = network(has_norm=True), list[Any]()
            optimizer = ADAM(model.parameters())
            with micro.LocalSteps(model, optimizer, reducer, comm=comm, **settings) as local:
                local.on_round = lambda s: ended.append((s.fragment, s.bytes_sent, s.summary.select_s >= 0))
                parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "local": local}
                for name, part in parts.items() if saved else ():
                    part.load_state_dict(saved[comm.rank][name])  # type: ignore[index]
                for step in steps:
                    backward(model, step, comm.rank)
                    optimizer.step()
                return through_a_file({name: part.state_dict() for name, part in parts.items()} | {"ended": ended})

        return on_ranks(2, work)

    whole = run(None, range(9))
    for stop in range(2, 8):
        begun = run(None, range(stop))
        resumed = run(begun, range(stop, 9))
        for one, first, other in zip(whole, begun, resumed, strict=True):
            assert one["ended"] == first["ended"] + other["ended"]
            assert_same(one["model"], other["model"])
            for a, b in zip(one["local"]["buckets"], other["local"]["buckets"], strict=True):
                for key in ("memory", "start", "weights", "moved", "outer"):
                    assert_same(a[key], b[key])


def test_what_is_not_finite_takes_all_fragments_back() -> None:
    models = [network() for _ in range(2)]
    reducer = micro.SparseReducer(micro.TopK(), 0.2, nonfinite="skip")

    def work(comm: Comm) -> tuple[Tensor, bool]:
        model = models[comm.rank]
        optimizer, skipped = ADAM(model.parameters()), []
        with micro.LocalSteps(model, optimizer, reducer, every=4, fragments=2, delay=1, comm=comm) as local:
            local.on_round = lambda stats: skipped.append(stats.skipped)
            for step in range(8):
                backward(model, step, comm.rank)
                if step == 1 and comm.rank == 1:
                    model.get_parameter("a.weight").grad[0, 0] = float("nan")  # type: ignore[index]
                optimizer.step()
            local.finish()
            return flat(model), any(skipped)

    (one, first), (other, second) = on_ranks(2, work)
    assert first
    assert second
    assert torch.isfinite(one).all()
    assert torch.equal(one, other)


def test_the_end_of_an_exchange_is_waited_for_on_the_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Any] = []
    stream = SimpleNamespace(record_event=lambda: "written", wait_event=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: devices.append(device) or stream)
    vector: Any = SimpleNamespace(start=torch.empty(0, device="meta"), moved=None)
    exchange, lane = Exchange([vector], []), SimpleNamespace(put=lambda run, _: run())
    exchange._device = torch.device("cuda", 1)
    exchange.start(lambda: "stats", lane)  # type: ignore[arg-type, return-value]
    assert exchange.result() == "stats"  # type: ignore[comparison-overlap]
    assert devices == [torch.device("cuda", 1)] * 2


# --- what is refused --------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str, Any]] = [
    ({"fragments": 0}, "fragments", 0),
    ({"fragments": 5}, "fragments", 5),
    ({"fragments": "layers"}, "fragments", "layers"),
    ({"fragments": [["*"], ["c.*"]]}, "fragments", "c.*"),
    ({"fragments": ["*", "b.*"]}, "fragments overlap", "b.weight"),
    ({"fragments": ["a.*"]}, "fragments leave out", "b.bias"),
    ({"fragments": 5, "every": 8}, "the 4 trained parameters", 5),
    ({"delay": 4}, "delay", 4),
    ({"delay": 0.5}, "delay", 0.5),
    ({"mix": 0.0}, "mix", 0.0),
    ({"mix": 1.5}, "mix", 1.5),
]


@pytest.mark.parametrize(("settings", "key", "given"), WRONG)
def test_what_does_not_fit_is_refused_before_the_first_step(settings: dict[str, Any], key: str, given: Any) -> None:
    model: nn.Module = network()
    own = {"every": 4, **settings}
    refused(lambda: micro.LocalSteps(model, SGD(model.parameters()), SPARSE, comm=Comm(), **own), key, given)
