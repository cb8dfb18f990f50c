"""Tasks: model, data, loss and measures of a run, by the kind of its model."""

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import data
import models
from data.augment import AUGMENTATIONS
from data.text_batches import NUM_COLUMNS
from experiments.config.builders import build_model
from experiments.config.errors import UserError, check_choice
from experiments.config.schema import TrainConfig

Batch = tuple[Tensor, ...]
Carry = tuple[Tensor, ...] | None
Place = dict[str, Any]  # of a rank: its number, how many there are, and its device

COUNTED = ("gpt",)  # models that say how many operations a word takes
_EVAL_IMAGES, _EVAL_USERS = 500, 256  # of a batch of the test set
_RESIDENT_BYTES = 2**30
_UNUSED = {"augment": "none", "sequence_length": None, "drawn": 0, "negatives": None}  # of a data set, for others


def load_task(config: TrainConfig, device: torch.device) -> "Task":
    """Read the data and make the model."""
    dataset = config.dataset
    content = data.load(dataset.name, root=dataset.root, seed=config.seed, **dataset.settings)
    sizes = data.info(dataset.name, dataset.root, **dataset.settings).sizes
    torch.manual_seed(data.mix(config.seed))  # of the first weights, the same on all ranks
    model = build_model(config, sizes).to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if isinstance(content, data.Text) and isinstance(getattr(model, "spelling", None), torch.Tensor):
        model.spelling.copy_(data.characters_of_words(content.words))  # type: ignore[operator]
    if config.compile:
        model.compile()  # in place: parameters keep their names
    return _kind_of(config)(config, model, content, device)


def check_task(config: TrainConfig, info: data.DatasetInfo) -> None:
    """Raise UserError where model and data set are of different kinds, or a setting fits neither."""
    task, name = _kind_of(config), config.model.name
    if info.kind != task.reads:
        raise UserError(
            f"model {name} learns from {task.reads}, dataset {config.dataset.name} holds {info.kind}: "
            "change one of them"
        )
    if config.channels_last and task is not _Images:
        raise UserError(f"channels_last is for images, model {name} learns from {task.reads}: leave it out")
    if config.peak_tflops is not None and name not in COUNTED:
        raise UserError(f"peak_tflops is for {', '.join(COUNTED)}, got it for {name}: leave it out")
    for key, unused in _UNUSED.items():
        if key not in task.needs and (given := getattr(config.dataset, key)) != unused:
            raise UserError(f"dataset.{key} has no effect for model {name}, got {given}: leave it out")
    task.check(config, info)


def steps_per_epoch(config: TrainConfig, info: data.DatasetInfo) -> int:
    """Return how many steps an epoch has, 0 where the data does not fill one."""
    return max(0, _kind_of(config).num_batches(config, info.num_train)) // config.accumulate


class Task(ABC):
    """One model, and each rank's share of the data, for any number of ranks.

    Attributes:
        reads: the kind of data.
        needs: the settings of the data set that it has a use for.
        model: on its device, with the run's first weights.
    """

    reads: str
    needs: tuple[str, ...]

    def __init__(self, config: TrainConfig, model: nn.Module, content: Any, device: torch.device) -> None:
        self.config, self.model, self.content, self.device = config, model, content, device

    @property
    def words_per_batch(self) -> int:
        """Words that a rank's batch trains on; 0 where it has none."""
        return 0

    def loss(self, model: nn.Module, batch: Batch, carry: Carry = None) -> tuple[Tensor, Carry]:
        """Return the mean loss of a batch, and the state that the model carries to the rank's next batch.

        Args:
            model: the task's model, or its DDP wrapper.
            carry: the state after the rank's previous batch, None at the start of an epoch.
        """
        with self._precision():
            return self.objective(model, batch, carry)

    @torch.no_grad()
    def evaluate(self, rank: int, world_size: int) -> Tensor:
        """Return (m,) float64 sums over a rank's share of the test set, the last of them the number of samples."""
        self.model.eval()
        with self._precision():
            sums = self.test_sums({"rank": rank, "world_size": world_size, "device": self.device})
        self.model.train()
        return sums

    def seed(self, step: int, rank: int) -> None:
        """Seed the generator of a forward pass (dropout): its numbers depend on seed, step and rank alone.

        Only that of the task's device: torch.manual_seed visits every kind of accelerator and takes half a millisecond.
        """
        seed = data.mix(self.config.seed, step, rank)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    @abstractmethod
    def batches(self, rank: int) -> data.Batches:
        """Return a rank's training batches."""

    @abstractmethod
    def objective(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the mean loss of a batch and the next carry; see loss."""

    @abstractmethod
    def test_sums(self, place: Place) -> Tensor:
        """Return the sums of ``evaluate``, which calls this in evaluation mode and without gradients."""

    @staticmethod
    @abstractmethod
    def measures(sums: Tensor) -> dict[str, float]:
        """Return the quality measures, from the sums over all ranks."""

    @classmethod
    @abstractmethod
    def check(cls, config: TrainConfig, info: data.DatasetInfo) -> None:
        """Raise UserError where the data set's settings do not fit this kind of task."""

    @staticmethod
    def num_batches(config: TrainConfig, num_train: int) -> int:
        """Return how many full batches each rank has in an epoch."""
        return num_train // (config.world_size * config.batch_size)

    def _share(self, rank: int) -> dict[str, Any]:
        """Return what says which part of the training data is a rank's, for batches of any kind."""
        config = self.config
        place = {"rank": rank, "world_size": config.world_size, "device": self.device}
        return {**place, "batch_size": config.batch_size}

    def _zeros(self, num: int) -> Tensor:
        """Return (num,) float64 zeros to add up in."""
        return torch.zeros(num, dtype=torch.float64, device=self.device)

    def _precision(self) -> AbstractContextManager[object]:
        mixed = self.config.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext()


class _Images(Task):
    """Predict the class of an image; measured by the accuracy."""

    reads, needs = "images", ("augment",)

    def batches(self, rank: int) -> data.Batches:
        return data.ShardedBatches(
            self._on_device(self.content.train_inputs),
            self._on_device(self.content.train_targets),
            **self._share(rank),
            seed=self.config.seed,
            augment=self.config.dataset.augment,
            mean=self.content.mean,
            std=self.content.std,
            image_size=self.content.test_inputs.shape[-1],  # photographs are stored larger, to be cropped
        )

    def objective(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        inputs, targets = batch
        return F.cross_entropy(model(self._in_memory_format(inputs)), targets), None

    def test_sums(self, place: Place) -> Tensor:
        sums = self._zeros(3)
        inputs, targets = self._on_device(self.content.test_inputs), self._on_device(self.content.test_targets)
        scale = {"mean": self.content.mean, "std": self.content.std}
        for images, classes in data.EvalBatches(inputs, targets, **place, batch_size=_EVAL_IMAGES, **scale):
            outputs = self.model(self._in_memory_format(images)).float()
            sums[0] += F.cross_entropy(outputs, classes, reduction="sum")
            sums[1] += (outputs.argmax(1) == classes).sum()
            sums[2] += len(classes)
        return sums

    @staticmethod
    def measures(sums: Tensor) -> dict[str, float]:
        loss, correct, num = sums.tolist()
        return {"test_loss": loss / num, "accuracy": correct / num}

    @classmethod
    def check(cls, config: TrainConfig, info: data.DatasetInfo) -> None:
        check_choice("dataset.augment", AUGMENTATIONS, config.dataset.augment)

    def _on_device(self, values: Tensor) -> Tensor:  # a larger set moves there batch by batch
        return values.to(self.device) if values.nbytes <= _RESIDENT_BYTES else values

    def _in_memory_format(self, inputs: Tensor) -> Tensor:
        return inputs.contiguous(memory_format=torch.channels_last) if self.config.channels_last else inputs


class _Ranking(Task):
    """Separate items that a user took from others; measured by the rank of the held-out item among negatives.

    Source: He, Liao, Zhang, Nie, Hu & Chua, Neural Collaborative Filtering, WWW 2017, arXiv 1708.05031: hit rate and
    NDCG at 10, each user once.
    """

    reads, needs = "interactions", ("negatives",)

    def batches(self, rank: int) -> data.Batches:
        negatives = _needed(self.config, "negatives")
        return data.InteractionBatches(self.content, **self._share(rank), negatives=negatives, seed=self.config.seed)

    def objective(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        users, items, labels = batch
        return F.binary_cross_entropy_with_logits(model(users, items).float(), labels), None

    def test_sums(self, place: Place) -> Tensor:
        sums = self._zeros(3)
        for user, items in data.EvalUsers(self.content, **place, batch_size_users=_EVAL_USERS):
            scores = self.model(user.flatten(), items.flatten()).float()
            sums += data.ranking_sums(scores.view_as(items))
        return sums

    @staticmethod
    def measures(sums: Tensor) -> dict[str, float]:
        hits, gains, num = sums.tolist()
        return {"hit_rate": hits / num, "ndcg": gains / num}

    @classmethod
    def check(cls, config: TrainConfig, info: data.DatasetInfo) -> None:
        size = _needed(config, "negatives") + 1
        if config.batch_size % size:
            near = max(size, config.batch_size // size * size)
            raise UserError(
                f"batch_size counts each positive with its {size - 1} negatives and must be a multiple of {size}, "
                f"got {config.batch_size}: take {near}"
            )

    @staticmethod
    def num_batches(config: TrainConfig, num_train: int) -> int:
        return num_train // (config.world_size * (config.batch_size // (_needed(config, "negatives") + 1)))


class _Language(Task):
    """Predict each word from those before it; measured by the perplexity, exp of the mean loss over all words."""

    reads = "text"
    needs: tuple[str, ...] = ("sequence_length", "drawn")
    least_columns = 2 * NUM_COLUMNS  # words that the columns of a test text have at least

    def batches(self, rank: int) -> data.Batches:
        share = {**self._share(rank), "sequence_length": self._length}
        if drawn := self.config.dataset.drawn:
            return data.DrawnWindows(self.content.train, **share, num_batches=drawn, seed=self.config.seed)
        return data.TextBatches(self.content.train, **share)

    @property
    def words_per_batch(self) -> int:
        return self.config.batch_size * self._length

    def objective(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        words, targets = batch
        logits, state = model(words, carry)
        # gradients do not flow back into the previous window
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), tuple(part.detach() for part in state)

    def test_sums(self, place: Place) -> Tensor:
        """Return (3,) sums: negative log-likelihood, the bytes of the words where each has some, words."""
        sums, carry = self._zeros(3), None
        for words, targets in data.EvalColumns(self.content.test, **place, sequence_length=self._length):
            logits, carry = self.model(words, carry)
            sums[0] += F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
            sums[-1] += targets.numel()
            if self.content.num_bytes is not None:
                sums[1] += self.content.num_bytes[targets.cpu()].sum().item()  # host sync: only while it is measured
        return sums

    @property
    def _length(self) -> int:
        return _needed(self.config, "sequence_length")

    @staticmethod
    def measures(sums: Tensor) -> dict[str, float]:
        loss, *num_bytes, num = sums.tolist()
        found = {"test_loss": loss / num, "perplexity": math.exp(min(loss / num, 700.0))}  # e^710 is beyond a float
        return found | ({"bits_per_byte": loss / num_bytes[0] / math.log(2)} if any(num_bytes) else {})

    @classmethod
    def check(cls, config: TrainConfig, info: data.DatasetInfo) -> None:
        if config.dataset.drawn and config.model.name not in COUNTED:
            raise UserError(
                f"dataset.drawn must be 0 for model {config.model.name}, which carries its state from batch to batch, "
                f"got {config.dataset.drawn}: leave it out, or take {', '.join(COUNTED)}"
            )
        length = _needed(config, "sequence_length")
        of_train = length + 1 if config.dataset.drawn else 0  # without, an epoch has no step
        parts = {"training": (info.num_train, of_train), "test": (info.num_test, max(cls.least_columns, length))}
        for part, (num, fewest) in parts.items():
            if num < fewest:
                raise UserError(
                    f"the {part} text of dataset {config.dataset.name} must have at least {fewest} words for model "
                    f"{config.model.name}, got {num}: take more, or lower dataset.sequence_length"
                )

    @staticmethod
    def num_batches(config: TrainConfig, num_train: int) -> int:
        read_on = (num_train // (config.world_size * config.batch_size) - 1) // _needed(config, "sequence_length")
        return config.dataset.drawn or read_on


class _Masked(_Language):
    """Predict masked words from all others; measured by the perplexity over the masked words.

    Source: Devlin, Chang, Lee & Toutanova, BERT, NAACL 2019, arXiv 1810.04805. Differences: a masked word becomes the
    vocabulary's unknown word, and the loss is that of the masked words alone, without the next-sentence task.
    """

    needs = ("sequence_length",)
    least_columns = 0

    def batches(self, rank: int) -> data.Batches:
        share = {**self._share(rank), **self._masking, "seed": self.config.seed}
        return data.MaskedBatches(self.content.train.long(), **share)

    def objective(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        words, targets = batch
        return F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=data.IGNORED_TARGET), None

    def test_sums(self, place: Place) -> Tensor:
        """Return (2,) sums: negative log-likelihood, masked words."""
        sums = self._zeros(2)
        for words, targets in data.EvalMasked(self.content.test.long(), **place, **self._masking):
            logits = self.model(words).float().flatten(0, 1)
            sums[0] += F.cross_entropy(logits, targets.flatten(), ignore_index=data.IGNORED_TARGET, reduction="sum")
            sums[1] += (targets != data.IGNORED_TARGET).sum()
        return sums

    @staticmethod
    def num_batches(config: TrainConfig, num_train: int) -> int:
        return num_train // _needed(config, "sequence_length") // (config.world_size * config.batch_size)

    @property
    def _masking(self) -> dict[str, Any]:
        words = len(self.content.words)
        return {"num_words": words, "mask_word": data.UNKNOWN, "sequence_length": self._length}


_KINDS: dict[str, type[Task]] = {
    "images": _Images,
    "text": _Language,
    "masked_text": _Masked,
    "interactions": _Ranking,
}


def _kind_of(config: TrainConfig) -> type[Task]:
    return _KINDS[models.kind_of(config.model.name)]


def _needed(config: TrainConfig, key: str) -> int:
    """Return a setting of the data set that must be a number of at least 1, or raise UserError."""
    given = getattr(config.dataset, key)
    if given is None or given < 1:
        raise UserError(f"dataset.{key} must be at least 1 for model {config.model.name}, got {given}")
    return given
