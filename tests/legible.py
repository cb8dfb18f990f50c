"""What a reader needs of a figure: named axes that are not empty, and distinct entries of the legend."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text


def check_legible(figure: Figure) -> None:
    """Fail if a panel is empty, an axis has no name anywhere, or two entries of the legend look the same."""
    panels = [axes for axes in figure.axes if axes.axison]
    assert panels
    for axes in panels:
        assert axes.has_data(), f"an empty panel: {axes.get_title() or axes.get_xlabel()}"
    assert figure.get_supxlabel() or any(axes.get_xlabel() for axes in panels)
    width = figure.bbox.width
    for text in (text for axes in panels for text in _drawn_at_y(axes)):
        assert text.get_window_extent().x0 >= 0, f"cut off at the left: {text.get_text()}"
    for legend in figure.legends:
        assert 0 <= legend.get_window_extent().x0 < legend.get_window_extent().x1 <= width, "a legend that is cut off"
    names_of_rows = any(
        any(map(str.isalpha, text.get_text()[:1])) for axes in panels for text in axes.get_yticklabels()
    )
    assert names_of_rows or figure.get_supylabel() or any(axes.get_ylabel() for axes in panels)
    for legend in figure.legends:
        looks = [_look(handle) for handle in legend.legend_handles]
        assert len(set(looks)) == len(looks), [text.get_text() for text in legend.get_texts()]


def _drawn_at_y(axes: Axes) -> Iterator[Text]:
    """Yield the drawn numbers of the y axis; matplotlib also keeps some outside of it."""
    low, high = sorted(axes.get_ylim())
    for text in axes.get_yticklabels():
        if text.get_text() and text.get_visible() and low <= text.get_position()[1] <= high:
            yield text


def _look(handle: Any) -> tuple[str, ...]:
    """Return how an entry of a legend looks."""
    getters = ("get_color", "get_linestyle", "get_dashes", "get_marker", "get_facecolor", "get_hatch", "get_alpha")
    looks = [str(getattr(handle, getter)()) for getter in getters if hasattr(handle, getter)]
    face = getattr(handle, "get_markerfacecolor", lambda: "")()
    return (*looks, str(face), str(getattr(handle, "_unscaled_dash_pattern", "")))


@contextmanager
def every_figure_is_legible() -> Iterator[list[Figure]]:
    """Check each figure that is written inside, and collect them; a figure that is written twice is there twice."""
    written, save = [], Figure.savefig

    def checked(figure: Figure, *arguments: Any, **settings: Any) -> None:
        check_legible(figure)
        written.append(figure)
        save(figure, *arguments, **settings)

    with mock.patch.object(Figure, "savefig", checked):
        yield written
