"""MovieLens: the films that each user rated, as implicit feedback."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from data.file_sums import sums_of, try_to_write
from data.leave_one_out import leave_one_out, tested_users
from data.source import DatasetInfo, Interactions, Published


@dataclass(frozen=True, kw_only=True)
class _Movielens(Published):
    """Every rated film counts as taken by its user; the latest of each user is held out.

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

    FILE: ClassVar[str]
    DELIMITER: ClassVar[str]  # one character
    COLUMNS: ClassVar[tuple[int, int, int]]  # columns of user, item and time, from 0
    HEADER: ClassVar[str | None] = None  # the first line, if it is not a rating

    num_negatives: int = 100

    def load(self, root: str | None, seed: int) -> Interactions:
        """Read the pairs and draw the negatives of the test; the seed does not matter."""
        checksums = self.checksums(root)
        users, items = self._pairs(self._path(root), *checksums.values())
        sizes = _sizes(users, items)
        return leave_one_out(users, items, num_negatives=self.num_negatives, checksums=checksums, **sizes)

    def info(self, root: str | None) -> DatasetInfo:
        """Count users, films and pairs, which writes the cache that `load` reads."""
        users, items = self._pairs(self._path(root), *self.checksums(root).values())
        sizes = _sizes(users, items)
        num_test = len(tested_users(users, num_negatives=self.num_negatives, **sizes))
        return DatasetInfo(kind="interactions", sizes=sizes, num_train=len(users) - num_test, num_test=num_test)

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksum of the file."""
        path = self._path(root)
        return sums_of(path.parent.parent, [path])

    def _path(self, root: str | None) -> Path:
        path = self.folder(root) / self.FILE
        if not path.is_file():
            raise self.wrong(path, "is not there")
        return path

    def _pairs(self, path: Path, checksum: str) -> tuple[Tensor, Tensor]:
        """Return (num,) int64 users, ascending, and their items in the order of time."""
        cache = path.with_name(f"{path.name}.{checksum[:16]}.npy")
        pairs = _read_cache(cache)
        if pairs is None:
            pairs = _in_time(*self._parse(path))
            try_to_write(cache, lambda file: np.save(file, pairs))
        users, items = torch.from_numpy(pairs).long()
        return users, items

    def _parse(self, path: Path) -> np.ndarray:
        """Return (3, num) int64: users, items and times as in the file."""
        try:
            with path.open(encoding="utf-8-sig") as file, warnings.catch_warnings():
                warnings.simplefilter("error")  # numpy only warns when the file is empty
                if self.HEADER is not None and file.readline().strip() != self.HEADER:
                    raise ValueError(f"its first line is not {self.HEADER}")
                table = np.loadtxt(
                    file, dtype=np.int64, delimiter=self.DELIMITER, comments=None, usecols=self.COLUMNS, ndmin=2
                )
        except (OSError, ValueError, Warning) as error:
            raise self.wrong(path, f"is not a file of ratings ({' '.join(str(error).split())})") from error
        return table.T


class Movielens100k(_Movielens):
    """100,000 ratings of 1,682 films by 943 users."""

    NAME, FOLDER, FILE = "movielens100k", "ml-100k", "u.data"
    DELIMITER, COLUMNS = "\t", (0, 1, 3)


class Movielens1m(_Movielens):
    """1,000,209 ratings of 3,706 films by 6,040 users."""

    NAME, FOLDER, FILE = "movielens1m", "ml-1m", "ratings.dat"
    DELIMITER, COLUMNS = ":", (0, 2, 6)  # '::' leaves every second column empty


class Movielens20m(_Movielens):
    """20,000,263 ratings of 26,744 films by 138,493 users."""

    NAME, FOLDER, FILE = "movielens20m", "ml-20m", "ratings.csv"
    DELIMITER, COLUMNS, HEADER = ",", (0, 1, 3), "userId,movieId,rating,timestamp"


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
    """Return what `_in_time` returned, or None if the file is missing or damaged."""
    try:
        pairs: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return pairs if pairs.dtype == np.int32 and pairs.ndim == len(pairs) == 2 else None
