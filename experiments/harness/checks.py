"""What can be known to go wrong before a worker starts."""

import torch

import data
from experiments.harness.bucketing import make_plan
from experiments.harness.config import TrainConfig, build_model
from experiments.harness.errors import UserError


def check_content(config: TrainConfig) -> None:
    """Look at data and model as the workers will find them.

    Raises:
        UserError: data missing or torn, a model that does not fit it, a plan that does not fit the model, more workers
            than batches or devices.
    """
    try:
        data.check(config.dataset.name, config.dataset.root, **config.dataset.settings)
        info = data.info(config.dataset.name, config.dataset.root, **config.dataset.settings)
        with torch.device("meta"):
            model = build_model(config, info.in_channels, info.num_classes)
    except ValueError as error:
        raise UserError(str(error)) from None
    make_plan(config, model)
    needed = config.world_size * config.batch_size
    if info.num_train < needed:
        raise UserError(
            f"world_size {config.world_size} x batch_size {config.batch_size} needs {needed} samples a step, "
            f"dataset {config.dataset.name} has {info.num_train}: lower one of them"
        )
    devices = torch.cuda.device_count()
    if config.cluster.device == "cuda" and devices < (1 if config.cluster.simulated else config.cluster.nproc_per_node):
        raise UserError(f"cluster.device=cuda needs {config.cluster.nproc_per_node} GPUs here, there are {devices}")
