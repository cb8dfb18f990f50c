"""Tasks: the data, loss and measures of a run, chosen by the kind of its model."""

import torch

import data
import models
from experiments.config.builders import build_model
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.training.tasks.base import Batch, Carry, Task
from experiments.training.tasks.images import ImageTask
from experiments.training.tasks.interactions import RankingTask
from experiments.training.tasks.text import LanguageTask, MaskedTask

__all__ = ["Batch", "Carry", "Task", "check_task", "load_task", "steps_per_epoch"]

_TASKS: dict[str, type[Task]] = {
    "images": ImageTask,
    "text": LanguageTask,
    "masked_text": MaskedTask,
    "interactions": RankingTask,
}
COUNTED = ("gpt",)  # models that say how many operations a word takes
_DATA = {"masked_text": "text"}  # the kind of data that a kind of model reads, where the names differ


def load_task(config: TrainConfig, device: torch.device) -> Task:
    """Read the data and make the model."""
    content = data.load(config.dataset.name, root=config.dataset.root, seed=config.seed, **config.dataset.settings)
    sizes = data.info(config.dataset.name, config.dataset.root, **config.dataset.settings).sizes
    torch.manual_seed(data.mix(config.seed))  # of the first weights, the same on all ranks
    model = build_model(config, sizes).to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if isinstance(content, data.Text) and isinstance(getattr(model, "spelling", None), torch.Tensor):
        model.spelling.copy_(data.characters_of_words(content.words))  # type: ignore[operator]
    if config.compile:
        model.compile()  # in place: parameters keep their names
    return _TASKS[models.kind_of(config.model.name)](config, model, content, device)


def check_task(config: TrainConfig, info: data.DatasetInfo) -> None:
    """Raise UserError where model and data set are of different kinds, or a setting fits neither."""
    kind = models.kind_of(config.model.name)
    wanted = _DATA.get(kind, kind)
    if info.kind != wanted:
        raise UserError(
            f"model {config.model.name} learns from {wanted}, dataset {config.dataset.name} holds {info.kind}: "
            "change one of them"
        )
    if config.channels_last and kind != "images":
        raise UserError(f"channels_last is for images, model {config.model.name} learns from {wanted}: leave it out")
    if config.peak_tflops is not None and config.model.name not in COUNTED:
        raise UserError(f"peak_tflops is for {', '.join(COUNTED)}, got it for {config.model.name}: leave it out")
    _TASKS[kind].check(config)
    if info.num_test < (fewest := _TASKS[kind].fewest_test(config)):
        raise UserError(
            f"the test text of dataset {config.dataset.name} must have at least {fewest} words for model "
            f"{config.model.name}, got {info.num_test}: take more, or lower dataset.sequence_length"
        )


def steps_per_epoch(config: TrainConfig, info: data.DatasetInfo) -> int:
    """Return how many steps an epoch has, 0 where the data does not fill one."""
    task = _TASKS[models.kind_of(config.model.name)]
    return max(0, task.num_batches(config, info.num_train)) // config.accumulate
