"""Data sets in tests: files that a test writes, and a check that a loaded set matches its description."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import data


def written(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files below a folder; return the folder."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def load(name: str, root: Path | None = None, seed: int = 0, **settings: Any) -> Any:
    """Load a set, and compare it with what check and info say before a file is read."""
    place = None if root is None else str(root)
    data.check(name, place, **settings)
    loaded, info = data.load(name, root=place, seed=seed, **settings), data.info(name, place, **settings)
    assert loaded.checksums
    match loaded:
        case data.Classification():
            _check_images(loaded, info)
        case data.Text():
            letters = data.characters_of_words(loaded.words)
            sizes = {"num_words": len(set(loaded.words)), "num_characters": letters.max() + 1}
            assert (info.kind, info.sizes) == ("text", sizes | {"word_length": letters.shape[1]})
            assert (info.num_train, info.num_test) == (len(loaded.train), len(loaded.test))
            assert int(torch.cat([loaded.train, loaded.test]).max()) < len(loaded.words)
        case data.Interactions():
            assert info.sizes == {"num_users": loaded.num_users, "num_items": loaded.num_items}
            assert (info.num_train, info.num_test) == (len(loaded.users), (loaded.test_items >= 0).sum())
            check_interactions(loaded)
    return loaded


def _check_images(loaded: data.Classification, info: data.DatasetInfo) -> None:
    channels, num_classes, side = (info.sizes[key] for key in ("in_channels", "num_classes", "image_size"))
    assert (info.kind, loaded.num_classes, loaded.in_channels) == ("images", num_classes, channels)
    assert len(loaded.mean) == len(loaded.std) == channels
    for inputs, targets, num in (
        (loaded.train_inputs, loaded.train_targets, info.num_train),
        (loaded.test_inputs, loaded.test_targets, info.num_test),
    ):
        assert inputs.shape == (num, channels, side, side)
        assert targets.dtype == torch.int64
        assert set(targets.tolist()) <= set(range(num_classes))


def items_of(content: data.Interactions) -> list[set[int]]:
    """Return the training items of each user."""
    taken: list[set[int]] = [set() for _ in range(content.num_users)]
    for user, item in zip(content.users.tolist(), content.items.tolist(), strict=True):
        taken[user].add(item)
    return taken


def check_interactions(content: data.Interactions) -> None:
    """Fail unless pairs ascend, and each tested item was not trained on and is followed by items never taken."""
    assert ((content.users.long() * content.num_items + content.items).diff() > 0).all()
    assert len(content.test_items) == len(content.test_negatives) == content.num_users
    rows = zip(items_of(content), content.test_items.tolist(), content.test_negatives.tolist(), strict=True)
    for taken, held_out, negatives in rows:
        if held_out == -1:
            assert set(negatives) == {-1}
            continue
        assert held_out not in taken
        assert len(set(negatives)) == len(negatives)
        assert set(negatives) <= set(range(content.num_items)) - taken - {held_out}
