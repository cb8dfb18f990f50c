"""The GPT of the gallery in the loops of frameworks with their options on, and in a plain loop that does the same.

Options: gradient accumulation, bfloat16, the framework's own clipping; validation, checkpoints, early stops in between.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import micro

ACCUMULATED = 2
MAX_NORM = 0.05  # below the norms of most updates
REDUCER = micro.SparseReducer(micro.Micro(), density=0.05)


def require(framework: str) -> None:
    """Skip a test where the framework is not installed; it is not imported."""
    if importlib.util.find_spec(framework) is None or importlib.util.find_spec("accelerate") is None:
        pytest.skip(f"{framework} is not installed: pip install '.[frameworks]'")


@functools.cache
def gallery() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[2] / "docs/gallery"))
    return importlib.import_module("gpt")


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loader_of(rank: int, world_size: int) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(gallery().Text(), batch_sampler=gallery().batches_of(rank, world_size))


def plain() -> Tensor:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(gallery().GPT())
    micro.attach(model, REDUCER)
    optimizer = optimizer_of(model)
    for number, batch in enumerate(loader_of(dist.get_rank(), dist.get_world_size())):
        is_last = number % ACCUMULATED == ACCUMULATED - 1
        with nullcontext() if is_last else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch)["loss"]
            (loss / ACCUMULATED).backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def with_accelerate(_: Path) -> Tensor:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATED)
    network = gallery().GPT()
    loader = DataLoader(gallery().Text(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(network, optimizer_of(network), loader)
    micro.attach(model, REDUCER)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def with_fabric(_: Path) -> Tensor:
    from lightning.fabric import Fabric

    fabric, network = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed"), gallery().GPT()
    fabric.launch()
    model, optimizer = fabric.setup(network, optimizer_of(network))
    micro.attach(model, REDUCER)
    for number, batch in enumerate(loader_of(fabric.global_rank, fabric.world_size)):
        is_last = number % ACCUMULATED == ACCUMULATED - 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(model(**batch)["loss"] / ACCUMULATED)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def with_lightning(folder: Path) -> Tensor:
    """Train with validation in between and an early stop that does not occur."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    module = lightning_module()
    trainer = lightning_trainer(
        precision="bf16-mixed",
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=MAX_NORM,
        val_check_interval=ACCUMULATED,
        callbacks=[EarlyStopping("val_loss"), ModelCheckpoint(folder, monitor="val_loss")],
    )
    trainer.fit(module)
    return flat(module)


def lightning_trainer(*, callbacks: list[Any], **settings: Any) -> Any:
    from lightning.pytorch import Trainer

    from micro.integrations.lightning import MicroCallback

    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, MicroCallback(REDUCER)],
        **settings,
    )


def lightning_module() -> Any:
    from lightning.pytorch import LightningModule

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = gallery().GPT()

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return self.network(**batch)["loss"]

        def validation_step(self, batch: dict[str, Tensor]) -> None:
            self.log("val_loss", self.network(**batch)["loss"], sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

        def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
            return loader_of(self.global_rank, self.trainer.world_size)

        def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
            return DataLoader(gallery().Text(), batch_size=64)

    return Lit()


def with_trainer(folder: Path) -> Tensor:
    """Train with evaluations in between, one checkpoint kept, and the best model, which is the last, in the end."""
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    from micro.integrations.transformers import MicroCallback

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=True,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=ACCUMULATED,
        max_grad_norm=MAX_NORM,
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        label_names=["labels"],
        report_to=[],
        disable_tqdm=True,
    )
    network = gallery().GPT()
    optimizer = optimizer_of(network)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)
    text = gallery().Text()
    trainer = Trainer(network, arguments, train_dataset=text, eval_dataset=text, optimizers=(optimizer, constant))
    trainer.add_callback(MicroCallback(trainer, REDUCER))
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    return flat(network)


LOOPS: dict[Callable[[Path], Tensor], str] = {
    with_accelerate: "accelerate",
    with_fabric: "lightning",
    with_lightning: "lightning",
    with_trainer: "transformers",
}
