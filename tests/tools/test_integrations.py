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


def test_a_rank_takes_its_own_of_the_states_of_all() -> None:
    attachment = attached()
    for everywhere in (False, True):
        saved = micro.AllRanks(attachment, everywhere=everywhere).state_dict()
        second = micro.attach(trained(), REDUCER)
        micro.AllRanks(second).load_state_dict(saved)
        assert torch.equal(second.residuals()[0], attachment.residuals()[0])


def test_states_of_other_ranks_are_refused_or_averaged() -> None:
    attachment = attached()
    saved = {"ranks": of_two_ranks(attachment.state_dict())}
    refused(lambda: micro.AllRanks(attachment).load_state_dict(saved), "state is of 2 ranks", "resize=True")
    before = attachment.residuals()[0].clone()
    micro.AllRanks(attachment, resize=True).load_state_dict(saved)
    assert torch.equal(attachment.residuals()[0], before)


@pytest.mark.parametrize(("given", "named"), [({}, "got nothing"), ({"buckets": []}, "got the keys buckets")])
def test_a_file_without_the_states_of_all_ranks_is_refused(given: dict[str, Any], named: str) -> None:
    refused(lambda: micro.AllRanks(attached()).load_state_dict(given), "what micro.AllRanks gave to rank 0", named)


def callback_of_transformers(
    model: nn.Module,
    folder: Path,
    *,
    scaler: torch.amp.GradScaler | None = None,
    trial: int | None = None,
    **settings: Any,
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a callback, the train function that it notes, and the arguments that a Trainer gives to its calls."""
    pytest.importorskip("transformers")
    module = importlib.import_module("micro.integrations.transformers")
    arguments = SimpleNamespace(output_dir=str(folder), save_only_model=False)
    accelerator = SimpleNamespace(scaler=scaler)
    trainer = SimpleNamespace(model_wrapped=model, train=lambda *_: None, args=arguments, accelerator=accelerator)
    trainer._trial = trial
    trainer._get_output_dir = lambda trial: str(folder if trial is None else folder / f"run-{trial}")
    callback = module.MicroCallback(trainer, REDUCER, **settings)
    return callback, trainer.train, (arguments, SimpleNamespace(global_step=1), None)


def test_in_a_search_the_file_of_a_rank_is_in_the_checkpoint_of_its_trial(tmp_path: Path) -> None:
    model = trained()
    callback, _, given = callback_of_transformers(model, tmp_path, trial=3)
    callback.on_train_begin(*given)
    step(model)
    callback.on_save(*given)
    callback.on_train_end(*given)
    assert [path.name for path in tmp_path.iterdir()] == ["run-3"]
    assert len(list((tmp_path / "run-3/checkpoint-1").iterdir())) == 1


def test_the_trainer_of_transformers_goes_on_from_the_file_of_its_rank(tmp_path: Path) -> None:
    model = trained()
    callback, _, given = callback_of_transformers(model, tmp_path)
    callback.on_train_begin(*given)
    step(model)
    callback.on_save(*given)
    callback.on_train_end(*given)
    residual = callback.attachment.residuals()[0]
    assert bool(residual.any())
    (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-7")
    for resume in (True, str(tmp_path / "checkpoint-7")):
        again, train, _ = callback_of_transformers(trained(), tmp_path)
        train(resume)
        again.on_train_begin(*given)
        assert torch.equal(again.attachment.residuals()[0], residual)
    fresh, train, _ = callback_of_transformers(trained(), tmp_path)
    train()
    fresh.on_train_begin(*given)
    assert fresh.attachment.residuals() == []


def test_the_trainer_of_transformers_refuses_files_of_other_ranks(tmp_path: Path) -> None:
    callback, train, given = callback_of_transformers(trained(), tmp_path)
    train(str(tmp_path))
    refused(lambda: callback.on_train_begin(*given), "has no files micro_rank*.pt", "resume from another checkpoint")
    for rank, state in enumerate(of_two_ranks(attached().state_dict())):
        torch.save(state, tmp_path / f"micro_rank{rank}.pt")
    refused(lambda: callback.on_train_begin(*given), "is of 2 ranks, this group has 1", "resize=True")
    callback, train, _ = callback_of_transformers(trained(), tmp_path, resize=True)
    train(str(tmp_path))
    callback.on_train_begin(*given)
    assert bool(callback.attachment.residuals()[0].any())


def test_an_overflow_goes_to_the_scaler_of_the_framework(tmp_path: Path) -> None:
    scaler, models = torch.amp.GradScaler("cpu"), (trained(), trained())
    callback, _, given = callback_of_transformers(models[0], tmp_path, scaler=scaler)
    callback.on_train_begin(*given)
    pytest.importorskip("lightning")
    of_lightning = importlib.import_module("micro.integrations.lightning").MicroCallback(REDUCER)
    strategy = SimpleNamespace(model=models[1], precision_plugin=SimpleNamespace(scaler=scaler))
    of_lightning.on_fit_start(SimpleNamespace(strategy=strategy), None)
    for model in models:
        model(torch.full((2, 8), float("inf"))).sum().backward()
        assert all(bool(p.grad.isinf().all()) for p in model.parameters())


def test_the_callback_of_lightning_keeps_a_checkpoint_until_the_fit_begins() -> None:
    pytest.importorskip("lightning")
    module = importlib.import_module("micro.integrations.lightning")
    saved = {"ranks": of_two_ranks(attached().state_dict())[:1]}
    saved["ranks"][0]["world_size"] = 1
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=trained(), precision_plugin=None))
    callback = module.MicroCallback(REDUCER)
    assert callback.state_dict() == {}
    callback.load_state_dict(saved)
    callback.on_fit_start(trainer, None)
    assert bool(callback.attachment.residuals()[0].any())
    residual = callback.attachment.residuals()[0].clone()
    callback.teardown(trainer, None, "fit")
    after = callback.state_dict()
    again = {"ranks": [after["ranks"][0]]}
    trainer.strategy.model = trained()
    callback.load_state_dict(again)
    callback.on_fit_start(trainer, None)
    assert torch.equal(callback.attachment.residuals()[0], residual)
    callback.teardown(trainer, None, "fit")
    trainer.strategy.model = trained()
    callback.on_fit_start(trainer, None)
    assert callback.attachment.residuals() == []
