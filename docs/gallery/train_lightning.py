"""Train a GPT with Lightning, save, and resume from the checkpoint.

torchrun --nproc-per-node 2 train_lightning.py 1   # one epoch
torchrun --nproc-per-node 2 train_lightning.py 3   # resumes, up to the third
"""

import sys
from pathlib import Path

import torch
from gpt import GPT, Text, batches_of
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import micro
from micro.integrations.lightning import MicroCallback


class Lit(LightningModule):
    """The GPT with its optimizer and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.network = GPT()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        loss = self.network(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        """Print the loss of the last batch."""
        self.print(f"epoch {self.current_epoch}: loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return this rank's batches."""
        return DataLoader(Text(), batch_sampler=batches_of(self.global_rank, self.trainer.world_size))


def main(epochs: int, folder: Path) -> nn.Module:
    """Train up to ``epochs`` in all; the checkpoint is in ``folder``."""
    sparse = MicroCallback(micro.SparseReducer(micro.Micro(), density=0.05))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=epochs,
        callbacks=[sparse, ModelCheckpoint(folder, save_last=True)],
        use_distributed_sampler=False,  # batches_of divides the batches
        logger=False,
        enable_progress_bar=False,
    )
    path, module = folder / "last.ckpt", Lit()
    trainer.fit(module, ckpt_path=path if path.exists() else None)
    return module.network


if __name__ == "__main__":
    main(int(sys.argv[1]), Path("checkpoints"))
