"""What the process has imported from which fresh ranks are forked: torch, its compiler, micro's kernels, frameworks."""

import importlib
import importlib.util

import torch
import torch._dynamo  # which DDP and optimizers import

import micro

FRAMEWORKS = ("accelerate", "lightning.fabric", "lightning.pytorch", "transformers.trainer")

torch.set_num_threads(1)
for name in FRAMEWORKS:
    if importlib.util.find_spec(name.partition(".")[0]) is not None:
        importlib.import_module(name)
simulation = micro.Simulation(micro.SparseReducer(micro.Micro(), density=0.1), micro.Layout.flat(100), 2)
simulation.step(torch.ones(2, 100))
