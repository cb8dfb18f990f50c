"""Train a GPT with the Trainer of transformers, save, and resume from the checkpoint.

torchrun --nproc-per-node 2 train_trainer.py 1   # one epoch
torchrun --nproc-per-node 2 train_trainer.py 3   # resumes, up to the third
"""

import sys
from pathlib import Path

import torch
from gpt import GPT, Text
from torch import nn
from transformers import Trainer, TrainingArguments

import micro
from micro.integrations.transformers import MicroCallback


def main(epochs: int, folder: Path) -> nn.Module:
    """Train up to ``epochs`` in all; checkpoints are in ``folder``."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        train_sampling_strategy="sequential",  # the text is shuffled already
        max_grad_norm=0,  # no clipping, as in the other scripts
        ddp_find_unused_parameters=False,  # DDP's default; for other models the Trainer searches for unused parameters
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
    )
    network = GPT()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)
    trainer = Trainer(network, arguments, train_dataset=Text(), optimizers=(optimizer, constant))
    trainer.add_callback(MicroCallback(trainer, micro.SparseReducer(micro.Micro(), density=0.05)))
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return network


if __name__ == "__main__":
    main(int(sys.argv[1]), Path("checkpoints"))
