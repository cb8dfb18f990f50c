"""The callbacks for Lightning and the Trainer of transformers, and micro.AllRanks: what they refuse, in one process."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("one_rank")

REDUCER = micro.SparseReducer(micro.TopK(), density=0.1)


def trained() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(8, 8))


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 8)).square().sum().backward()


def attached() -> micro.Attachment:
    model = trained()
    attachment = micro.attach(model, REDUCER)
    step(model)
    return attachment


def of_two_ranks(saved: dict[str, Any]) -> list[dict[str, Any]]:
    return [saved | {"rank": rank, "world_size": 2} for rank in range(2)]


def test_a_rank_takes_its_own_of_the_states_of_all_and_other_ranks_are_refused_or_averaged() -> None:
    attachment = attached()
    residual = attachment.residuals()[0].clone()
    for everywhere in (False, True):
        saved = micro.AllRanks(attachment, everywhere=everywhere).state_dict()
        second = micro.attach(trained(), REDUCER)
        micro.AllRanks(second).load_state_dict(saved)
        assert torch.equal(second.residuals()[0], residual)
    both = {"ranks": of_two_ranks(attachment.state_dict())}
    refused(lambda: micro.AllRanks(attachment).load_state_dict(both), "state is of 2 ranks", "resize=True")
    micro.AllRanks(attachment, resize=True).load_state_dict(both)
    assert torch.equal(attachment.residuals()[0], residual)
    for wrong, part in (({}, "got nothing"), ({"buckets": []}, "got the keys buckets")):
        refused(lambda wrong=wrong: micro.AllRanks(attachment).load_state_dict(wrong), "gave to rank 0", part)  # type: ignore[misc]


class Loop:
    """A Trainer of transformers as the callback sees it, at its first step: ``resume`` is what train is given."""

    def __init__(
        self, folder: Path, *resume: Any, scaler: Any = None, trial: int | None = None, **settings: Any
    ) -> None:
        pytest.importorskip("transformers")
        module = importlib.import_module("micro.integrations.transformers")
        arguments = SimpleNamespace(output_dir=str(folder), save_only_model=False)
        trainer = SimpleNamespace(model_wrapped=trained(), train=lambda *_: None, args=arguments)
        trainer.accelerator, trainer._trial = SimpleNamespace(scaler=scaler), trial
        trainer._get_output_dir = lambda trial: str(folder if trial is None else folder / f"run-{trial}")
        self.model = trainer.model_wrapped
        self.callback = module.MicroCallback(trainer, REDUCER, **settings)
        trainer.train(*resume)
        self.given = (arguments, SimpleNamespace(global_step=1), None)

    def begin(self) -> micro.Attachment:
        self.callback.on_train_begin(*self.given)
        return self.callback.attachment

    def train_and_save(self) -> torch.Tensor:
        """Take a step, save and end; return the residual."""
        attachment = self.begin()
        step(self.model)
        self.callback.on_save(*self.given)
        self.callback.on_train_end(*self.given)
        return attachment.residuals()[0]


def test_the_trainer_of_transformers_continues_from_the_file_of_its_rank(tmp_path: Path) -> None:
    residual = Loop(tmp_path).train_and_save()
    assert bool(residual.any())
    (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-7")
    for resume in (True, str(tmp_path / "checkpoint-7")):
        assert torch.equal(Loop(tmp_path, resume).begin().residuals()[0], residual)
    assert Loop(tmp_path).begin().residuals() == []
    Loop(tmp_path / "search", trial=3).train_and_save()
    assert len(list((tmp_path / "search/run-3/checkpoint-1").iterdir())) == 1


def test_the_trainer_of_transformers_refuses_files_of_other_ranks(tmp_path: Path) -> None:
    loop = Loop(tmp_path, str(tmp_path))
    refused(loop.begin, "has no files micro_rank*.pt", "resume from another checkpoint")
    for rank, state in enumerate(of_two_ranks(attached().state_dict())):
        torch.save(state, tmp_path / f"micro_rank{rank}.pt")
    refused(loop.begin, "is of 2 ranks, this group has 1", "resize=True")
    assert bool(Loop(tmp_path, str(tmp_path), resize=True).begin().residuals()[0].any())


def lightning(model: nn.Module, scaler: Any = None) -> tuple[Any, Any]:
    """Return a callback for Lightning, and a trainer as it sees one."""
    pytest.importorskip("lightning")
    callback = importlib.import_module("micro.integrations.lightning").MicroCallback(REDUCER)
    plugin = SimpleNamespace(scaler=scaler) if scaler else None
    return callback, SimpleNamespace(strategy=SimpleNamespace(model=model, precision_plugin=plugin))


def test_an_overflow_goes_to_the_scaler_of_the_framework(tmp_path: Path) -> None:
    scaler, model = torch.amp.GradScaler("cpu"), trained()
    callback, trainer = lightning(model, scaler)
    callback.on_fit_start(trainer, None)
    loop = Loop(tmp_path, scaler=scaler)
    loop.begin()
    for each in (model, loop.model):
        each(torch.full((2, 8), float("inf"))).sum().backward()
        assert all(bool(p.grad.isinf().all()) for p in each.parameters())


def test_the_callback_of_lightning_keeps_a_checkpoint_until_the_fit_begins() -> None:
    callback, trainer = lightning(trained())
    assert callback.state_dict() == {}
    attachment = attached()
    saved = {"ranks": [attachment.state_dict() | {"rank": 0}]}
    for _ in range(2):  # the second from what the first left
        trainer.strategy.model = trained()
        callback.load_state_dict(saved)
        callback.on_fit_start(trainer, None)
        assert torch.equal(callback.attachment.residuals()[0], attachment.residuals()[0])
        callback.teardown(trainer, None, "fit")
        saved = {"ranks": [callback.state_dict()["ranks"][0]]}
    trainer.strategy.model = trained()
    callback.on_fit_start(trainer, None)
    assert callback.attachment.residuals() == []
