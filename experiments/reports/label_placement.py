"""Names beside points, placed so that nothing is written over anything else."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

SIZE = 6.0  # points
MARKER = 3.0  # half the side of a marker's square
RADII = (5, 7, 9, 12, 15, 18, 22, 26, 31, 36, 42, 48, 55, 63, 72, 84, 100, 120)
ANGLES = 32
FIRST = 2  # directions are tried from the upper right


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in points."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: "Box") -> bool:
        """Tell whether two rectangles share a place."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def holds(self, x: float, y: float) -> bool:
        """Tell whether a point lies inside."""
        return self.left < x < self.right and self.bottom < y < self.top

    def within(self, other: "Box") -> bool:
        """Tell whether this rectangle lies inside the other."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )


def name_points(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    colors: Sequence[str],
    path: Sequence[tuple[float, float]] = (),
) -> None:
    """Write each name near its point, with a line to it where it had to go further away; ``path`` stays free too.

    An empty name is not written, but nothing is written over its point.
    The figure's layout and the limits of ``axes`` must be settled: places are chosen for them.
    """

    def place_of(x: float, y: float) -> tuple[float, float]:
        return 72 / dpi * x, 72 / dpi * y

    dpi = axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    centers = [place_of(*axes.transData.transform(point)) for point in points]
    frame = Box(*place_of(axes.bbox.x0, axes.bbox.y0), *place_of(axes.bbox.x1, axes.bbox.y1))
    markers = [Box(x - MARKER, y - MARKER, x + MARKER, y + MARKER) for x, y in centers]
    placed: list[Box] = []
    corners = [place_of(*axes.transData.transform(point)) for point in path]
    lines: list[tuple[float, float]] = []
    on_path = [spot for start, end in pairwise(corners) for spot in _along(start, end)]
    for center, name, color, point in zip(centers, names, colors, points, strict=True):
        if not name:
            continue
        box = _best_place(center, _width(name), frame, markers, placed, lines, on_path)
        placed.append(box)
        x, y = (box.left + box.right) / 2, (box.bottom + box.top) / 2
        lines += _between(center, box)
        far = math.dist(center, _nearest(center, box)) > 2 * MARKER
        axes.annotate(
            name,
            point,
            xytext=(x - center[0], y - center[1]),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=SIZE,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 2}
            if far
            else None,
        ).set_in_layout(False)


def _best_place(
    center: tuple[float, float],
    width: float,
    frame: Box,
    markers: Sequence[Box],
    placed: Sequence[Box],
    lines: Sequence[tuple[float, float]],
    path: Sequence[tuple[float, float]],
) -> Box:
    """Return the first free place around ``center``, nearest first; the least bad one where there is none."""
    return min(
        _candidates(center, width),
        key=lambda box: _faults(center, box, frame, markers, placed, lines, path),
    )


def _faults(
    center: tuple[float, float],
    box: Box,
    frame: Box,
    markers: Sequence[Box],
    placed: Sequence[Box],
    lines: Sequence[tuple[float, float]],
    path: Sequence[tuple[float, float]],
) -> int:
    own = _between(center, box)
    crossed = any(other.holds(*spot) for other in placed for spot in own)
    covered = any(box.holds(*spot) for spot in lines)
    unreadable = not box.within(frame) or any(box.meets(other) for other in placed)
    on_markers = any(box.meets(marker) for marker in markers)
    on_path = any(box.holds(*spot) for spot in path)
    return 1000 * unreadable + 100 * (crossed + covered + on_markers) + on_path


def _candidates(center: tuple[float, float], width: float) -> Iterator[Box]:
    """Yield places for a name around ``center``: rings of rectangles whose nearest edge is a radius away."""
    half_width, half_height = width / 2 + 1, SIZE / 2 + 1
    for radius in RADII:
        for turn in range(ANGLES):
            angle = 2 * math.pi * (FIRST + turn) / ANGLES
            x = center[0] + math.cos(angle) * (radius + half_width)
            y = center[1] + math.sin(angle) * (radius + half_height)
            yield Box(x - half_width, y - half_height, x + half_width, y + half_height)


def _between(center: tuple[float, float], box: Box) -> list[tuple[float, float]]:
    """Return spots on the line from a point to a rectangle, its ends left out."""
    return _along(center, _nearest(center, box))


def _along(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """Return a spot every 2 points of the way."""
    count = int(math.dist(start, end) // 2)
    return [
        (start[0] + (end[0] - start[0]) * part / count, start[1] + (end[1] - start[1]) * part / count)
        for part in range(1, count)
    ]


def _nearest(center: tuple[float, float], box: Box) -> tuple[float, float]:
    return min(max(center[0], box.left), box.right), min(max(center[1], box.bottom), box.top)


def _width(name: str) -> float:
    return float(TextPath((0, 0), name, size=SIZE, prop=FontProperties(family="DejaVu Sans")).get_extents().width)
