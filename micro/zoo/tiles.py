"""Cut every parameter into square tiles (vectors into runs), and apply a DCT to each tile."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from micro.selectors.pieces import Pieces, pieces_at
from micro.values.flat import Layout

LARGE_ROW = 1 << 12  # elements of a row of tiles from which rows are multiplied one by one
TOGETHER = 1 << 17  # elements of equal regions transformed at once: a compromise of calls and memory


@dataclass(frozen=True, slots=True)
class Region:
    """Tiles of one shape in a parameter, viewed as a matrix, or in several equal parameters at equal distances.

    Attributes:
        offset, shape: of the matrix in the flat vector.
        rows, columns: (start, stop) of the region in the matrix.
        height, width: of a tile.
        place: start of its tiles in the tiled vector.
        repeats: number of parameters.
        period: distance in elements between these parameters, in both vectors.
    """

    offset: int
    shape: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]
    height: int
    width: int
    place: int
    repeats: int = 1
    period: int = 0

    @property
    def numel(self) -> int:
        """Number of elements of one parameter."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    @property
    def starts(self) -> list[int]:
        """The start of each tile in the tiled vector."""
        firsts = (self.place + number * self.period for number in range(self.repeats))
        return [start for first in firsts for start in range(first, first + self.numel, self.height * self.width)]

    def of_matrix(self, vector: Tensor) -> Tensor:
        """Return a view (repeats, tile rows, tile columns, height, width) of the region in ``vector`` (numel,)."""
        length = self.shape[1]
        start = self.offset + self.rows[0] * length + self.columns[0]
        return self._view(vector, start, (self.height * length, self.width, length, 1))

    def of_tiles(self, tiled: Tensor) -> Tensor:
        """Return a view of the region in the ``tiled`` vector (numel,), of the same shape."""
        tile = self.height * self.width
        num_columns = (self.columns[1] - self.columns[0]) // self.width
        return self._view(tiled, self.place, (num_columns * tile, tile, self.width, 1))

    def _view(self, vector: Tensor, start: int, strides: tuple[int, ...]) -> Tensor:
        grid = (self.rows[1] - self.rows[0]) // self.height, (self.columns[1] - self.columns[0]) // self.width
        sizes = (self.repeats, *grid, self.height, self.width)
        return vector.as_strided(sizes, (self.period, *strides), vector.storage_offset() + start)


@dataclass(frozen=True, slots=True)
class Tiling:
    """All tiles of a layout. The tiled vector has as many elements as the flat one."""

    regions: tuple[Region, ...]
    has_transform: bool

    def forward(self, vector: Tensor) -> Tensor:
        """Return the tiles (numel,) of ``vector`` (numel,), each transformed by a two-dimensional DCT if enabled."""
        tiled = torch.empty_like(vector)
        for region in self.regions:
            tiles, out = region.of_matrix(vector), region.of_tiles(tiled)
            if self.has_transform:
                _multiply(dct(region.height, tiles), tiles, dct(region.width, tiles).T, out)
            else:
                out.copy_(tiles)
        return tiled

    def inverse(self, tiled: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the vector (numel,) with these tiles, in ``out`` if given (same dtype)."""
        vector = torch.empty_like(tiled) if out is None else out
        for region in self.regions:
            tiles, matrix = region.of_tiles(tiled), region.of_matrix(vector)
            if self.has_transform:
                _multiply(dct(region.height, tiles).T, tiles, dct(region.width, tiles), matrix)
            else:
                matrix.copy_(tiles)
        return vector


def tiling_of(layout: Layout, size: int, has_transform: bool) -> Tiling:
    """Return tiles of ``size`` by ``size``, smaller at the edges; for vectors, runs of ``size``."""
    regions: list[Region] = []
    place = 0
    for offset, shape in zip(layout.offsets, layout.shapes, strict=True):
        matrix = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        for rows, height in _bands(matrix[0], size):
            for columns, width in _bands(matrix[1], size):
                regions.append(Region(offset, matrix, rows, columns, height, width, place))
                place += regions[-1].numel
    return Tiling(tuple(_merge_repeats(regions)), has_transform)


def _merge_repeats(regions: Sequence[Region]) -> Iterator[Region]:
    """Yield the regions, merging those of consecutive equal parameters."""
    alike: dict[Region, list[Region]] = {}
    for region in regions:
        alike.setdefault(replace(region, offset=0, place=region.place - region.offset), []).append(region)
    for same in alike.values():
        first = same[0]
        for region in same[1:]:
            period = first.period or region.offset - first.offset
            fits = (first.repeats + 1) * first.numel <= TOGETHER
            if fits and region.offset == first.offset + first.repeats * period:
                first = replace(first, repeats=first.repeats + 1, period=period)
            else:
                yield first
                first = region
        yield first


def _bands(length: int, size: int) -> list[tuple[tuple[int, int], int]]:
    """Return the part of a side that whole tiles cover, and the rest: (start, stop) and the tile's side."""
    whole = length // size * size
    parts = [((0, whole), size), ((whole, length), length - whole)]
    return [(span, side) for span, side in parts if span[1] > span[0]]


def tile_pieces(layout: Layout, size: int, device: torch.device) -> Pieces:
    """Return the position of each tile in the tiled vector."""
    regions = tiling_of(layout, size, has_transform=False).regions
    return pieces_at(sorted((start, start + of.height * of.width) for of in regions for start in of.starts), device)


def _multiply(left: Tensor, tiles: Tensor, right: Tensor, out: Tensor) -> None:
    """Set ``out`` to ``left @ tile @ right`` of each of ``tiles`` (repeats, tile rows, tile columns, height, width).

    Large regions are multiplied one row of tiles at a time: this needs no copy of the tiles, and results stay in the
    cache.
    """
    repeats, rows, columns, height, width = tiles.shape
    if repeats > 1 or rows == 1 or height * width * columns < LARGE_ROW:
        out.copy_(left @ tiles @ right)
        return
    half, whole = tiles.new_empty(2, columns, height, width)
    lefts = left.expand(columns, height, height)
    for row, place in zip(tiles[0], out[0], strict=True):
        torch.bmm(lefts, row, out=half)
        torch.mm(half.view(-1, width), right, out=whole.view(-1, width))
        place.copy_(whole)


def dct(length: int, like: Tensor) -> Tensor:
    """Return the orthonormal DCT-II (length, length) as a matrix of the type of ``like``."""
    return _dct(length, like.dtype, str(like.device))


@lru_cache(maxsize=64)
def _dct(length: int, dtype: torch.dtype, device: str) -> Tensor:
    places = torch.arange(length, dtype=torch.float64)
    matrix = torch.cos(math.pi / length * torch.outer(places, places + 0.5)) * math.sqrt(2 / length)
    matrix[0] /= math.sqrt(2)
    return matrix.to(dtype).to(device)
