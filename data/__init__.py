"""Data sets held in memory, and the batches that workers draw from them.

`check` one before any worker starts, `load` it inside each, then iterate `ShardedBatches` and `EvalBatches`. Adding a
data set means adding a file with a class like `Synthetic` here and a line in the table below.
"""

import difflib
import inspect

from data.batches import EvalBatches, ShardedBatches
from data.character_vocabulary import characters_of_words
from data.cifar import Cifar10, Cifar100
from data.digits import Digits
from data.folder_text import FolderText
from data.imagenet import ImageNet
from data.interaction_batches import EvalUsers, InteractionBatches, ranking_sums
from data.latent import Latent
from data.manuals import Manuals, ManualsBytes
from data.masked_batches import IGNORED_TARGET, EvalMasked, MaskedBatches
from data.movielens import Movielens1m, Movielens20m, Movielens100k
from data.seeding import generator, mix
from data.source import Batches, Classification, Content, DatasetInfo, Interactions, Source, Text
from data.synthetic import Synthetic
from data.text import UNKNOWN
from data.text_batches import DrawnWindows, EvalColumns, TextBatches
from data.text_files import Ptb, WikiText2

__all__ = [
    "IGNORED_TARGET",
    "UNKNOWN",
    "Batches",
    "Classification",
    "Content",
    "DatasetInfo",
    "DrawnWindows",
    "EvalBatches",
    "EvalColumns",
    "EvalMasked",
    "EvalUsers",
    "InteractionBatches",
    "Interactions",
    "MaskedBatches",
    "ShardedBatches",
    "Text",
    "TextBatches",
    "characters_of_words",
    "check",
    "generator",
    "info",
    "load",
    "mix",
    "names",
    "ranking_sums",
    "sums",
]

_SOURCES: dict[str, type[Source]] = {
    source.NAME: source
    for source in (
        *(Cifar10, Cifar100, Digits, ImageNet, Synthetic),
        *(FolderText, Manuals, ManualsBytes, Ptb, WikiText2),
        *(Latent, Movielens100k, Movielens1m, Movielens20m),
    )
}


def names() -> list[str]:
    """Return the names that `load`, `check` and `info` know, sorted."""
    return sorted(_SOURCES)


def load(name: str, *, root: str | None = None, seed: int = 0, **settings: object) -> Content:
    """Read a data set into memory, decoded once.

    Args:
        name: one of `names()`.
        root: folder that holds the data sets' own folders; for data sets that come from files.
        seed: the run's seed. Only data that is drawn at random depends on it, never a split.
        settings: of this data set, such as ``num_samples`` of the synthetic one.
    Raises:
        ValueError: a name or setting does not exist, or a file is missing, torn or not what it should be.
    """
    return _source(name, settings).load(root, seed)


def check(name: str, root: str | None = None, **settings: object) -> None:
    """Raise the ValueError that `load` would raise, before any worker starts; files are read, nothing is kept."""
    _source(name, settings).check(root)


def sums(name: str, root: str | None = None, **settings: object) -> dict[str, str]:
    """Return the sha256 of each file that a data set is read from. Raises: as `load`."""
    return _source(name, settings).checksums(root)


def info(name: str, root: str | None = None, **settings: object) -> DatasetInfo:
    """Return the sizes of a data set, without decoding images.

    Raises:
        ValueError: as for `load`, as far as the sizes need the files.
    """
    return _source(name, settings).info(root)


def _source(name: str, settings: dict[str, object]) -> Source:
    if name not in _SOURCES:
        close = difflib.get_close_matches(str(name), names(), n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"dataset must be one of {', '.join(names())}, got '{name}'{hint}")
    source = _SOURCES[name]
    allowed = list(inspect.signature(source).parameters)
    unknown = [key for key in settings if key not in allowed]
    if unknown:
        allows = f"allows only {', '.join(allowed)}" if allowed else "has no settings"
        raise ValueError(f"dataset '{name}' {allows}, got '{', '.join(unknown)}'")
    return source(**settings)
