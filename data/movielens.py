"""MovieLens: the films that each user rated, as implicit feedback."""

import contextlib
import hashlib
import os
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from data.file_sums import sums_of
from data.leave_one_out import leave_one_out, tested_users
from data.source import DatasetInfo, Interactions


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which file holds the ratings, and the format of its lines.

    Attributes:
        folder, file: the file's place below the data root.
        delimiter: one character.
        columns: of user, item and time, from 0.
        header: the first line, if it is none of the ratings.
    """

    folder: str
    file: str
    delimiter: str
    columns: tuple[int, int, int]
    header: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Movielens:
    """Every rating, whatever its stars, is a film that the user took; the latest of each user is held out.

    Users and films are numbered from 0 in the order of their ids. Of ratings with equal times, that of the later
    line counts as later; a film rated twice counts once, at its latest time. The sorted pairs are kept beside the file,
    in a cache named after the file's sha256; where that folder cannot be written, the file is parsed each time.

    Args:
        num_negatives: films that a user never rated; the held-out film is ranked against them. Users who rated fewer
            than two films, or left fewer than num_negatives, are not tested.

    Source: Harper & Konstan, The MovieLens Datasets, ACM TiiS 5(4), 2015; the protocol is that of He et al., Neural
    Collaborative Filtering, WWW 2017, arXiv 1708.05031, section 4.1. Differences: their public code ranks the held-out
    film against 99 others.
    """

    name: ClassVar[str]
    layout: ClassVar[Layout]

    num_negatives: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.num_negatives, int) or isinstance(self.num_negatives, bool) or self.num_negatives < 1:
            raise ValueError(f"num_negatives must be an integer of at least 1, got {self.num_negatives!r}")

    def load(self, root: str | None, seed: int) -> Interactions:
        """Read the pairs and draw the negatives of the test; the seed does not matter."""
        path = self._path(root)
        checksum = self._checksum(path)
        users, items = self._pairs(path, checksum)
        sizes = _sizes(users, items)
        checksums = {f"{self.layout.folder}/{self.layout.file}": checksum}
        return leave_one_out(users, items, num_negatives=self.num_negatives, checksums=checksums, **sizes)

    def check(self, root: str | None) -> None:
        """Parse the file, unless its cache is there; raise ValueError when it is missing or wrong."""
        self.info(root)

    def info(self, root: str | None) -> DatasetInfo:
        """Count users, films and pairs, which writes the cache that `load` reads."""
        path = self._path(root)
        users, items = self._pairs(path, self._checksum(path))
        sizes = _sizes(users, items)
        num_test = len(tested_users(users, num_negatives=self.num_negatives, **sizes))
        return DatasetInfo(kind="interactions", sizes=sizes, num_train=len(users) - num_test, num_test=num_test)

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksum of the file."""
        path = self._path(root)
        return sums_of(path.parent.parent, [path])

    def _path(self, root: str | None) -> Path:
        folder = self.layout.folder
        if root is None:
            raise ValueError(f"dataset {self.name} needs a data root, got None: name the folder that holds {folder}")
        return Path(root).expanduser() / folder / self.layout.file

    def _checksum(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}): {self._remedy(path)}") from error

    def _pairs(self, path: Path, checksum: str) -> tuple[Tensor, Tensor]:
        """Return (num,) int64 users, ascending, and their items in the order of time."""
        cache = path.with_name(f"{path.name}.{checksum[:16]}.npy")
        pairs = _read_cache(cache)
        if pairs is None:
            pairs = _in_time(*self._parse(path))
            _write_cache(cache, pairs)
        users, items = torch.from_numpy(pairs).long()
        return users, items

    def _parse(self, path: Path) -> np.ndarray:
        """Return (3, num) int64: users, items and times as in the file."""
        layout = self.layout
        try:
            with path.open(encoding="utf-8-sig") as file, warnings.catch_warnings():
                warnings.simplefilter("error")  # numpy only warns when the file is empty
                if layout.header is not None and file.readline().strip() != layout.header:
                    raise ValueError(f"its first line is not {layout.header}")
                table = np.loadtxt(
                    file, dtype=np.int64, delimiter=layout.delimiter, comments=None, usecols=layout.columns, ndmin=2
                )
        except (OSError, ValueError, Warning) as error:
            fault = " ".join(str(error).split())
            raise ValueError(f"{path} is not a file of MovieLens ratings ({fault}): {self._remedy(path)}") from error
        return table.T

    def _remedy(self, path: Path) -> str:
        again = f"remove {path.parent} and run" if path.parent.is_dir() else "run"
        return f"{again} python -m data.prepare {self.name} --root {path.parent.parent}"


class Movielens100k(_Movielens):
    """100,000 ratings of 1,682 films by 943 users."""

    __slots__ = ()
    name = "movielens100k"
    layout = Layout(folder="ml-100k", file="u.data", delimiter="\t", columns=(0, 1, 3))


class Movielens1m(_Movielens):
    """1,000,209 ratings of 3,706 films by 6,040 users."""

    __slots__ = ()
    name = "movielens1m"
    layout = Layout(folder="ml-1m", file="ratings.dat", delimiter=":", columns=(0, 2, 6))  # '::' hides empty columns


class Movielens20m(_Movielens):
    """20,000,263 ratings of 26,744 films by 138,493 users."""

    __slots__ = ()
    name = "movielens20m"
    layout = Layout(
        folder="ml-20m",
        file="ratings.csv",
        delimiter=",",
        columns=(0, 1, 3),
        header="userId,movieId,rating,timestamp",
    )


def _sizes(users: Tensor, items: Tensor) -> dict[str, int]:
    return {"num_users": int(users[-1]) + 1, "num_items": int(items.max()) + 1}


def _in_time(user_ids: np.ndarray, item_ids: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return (2, num) int32, users and items numbered from 0: by user, then by time, then by line."""
    users, items = (np.searchsorted(np.unique(ids), ids) for ids in (user_ids, item_ids))
    order = np.lexsort((times, users))  # stable, so lines of equal time stay in order
    pairs = np.stack([users[order], items[order]])
    keys = pairs[0] * (items.max() + 1) + pairs[1]
    by_pair = np.argsort(keys, kind="stable")
    is_last = np.append(np.diff(keys[by_pair]) != 0, True)
    return pairs[:, np.sort(by_pair[is_last])].astype(np.int32)


def _read_cache(path: Path) -> np.ndarray | None:
    """Return what `_in_time` returned, or None where the file is missing, torn or of another kind."""
    try:
        pairs = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError):
        return None
    if pairs.dtype != np.int32 or pairs.ndim != 2 or len(pairs) != 2 or pairs.size == 0:
        return None
    users, items = np.array(pairs)
    steps = np.diff(users, prepend=-1)
    dense = users[0] == 0 and steps.min() >= 0 and steps.max() <= 1
    if not dense or items.min() < 0 or items.max() >= len(items) or not np.bincount(items).all():
        return None
    return np.stack([users, items])


def _write_cache(path: Path, pairs: np.ndarray) -> None:
    """Write the cache whole or not at all; where the folder cannot be written, there is none."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # ranks may write at the same time
    try:
        with part.open("xb") as file:
            np.save(file, pairs)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
