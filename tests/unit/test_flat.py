"""A layout names every place of the flat vector, and pieces find their way into another layout."""

import pytest
import torch

from micro.values.flat import MAX_NUMEL, Layout

LAYOUT = Layout(("a", "scalar", "b", "empty"), ((2, 3), (), (4,), (0, 5)))


def test_places_follow_each_other_and_every_index_belongs_to_one_name() -> None:
    assert (LAYOUT.numels, LAYOUT.offsets, LAYOUT.numel) == ((6, 1, 4, 0), (0, 6, 7, 11), 11)
    assert dict(LAYOUT.slices()) == {"a": slice(0, 6), "scalar": slice(6, 7), "b": slice(7, 11), "empty": slice(11, 11)}
    assert [LAYOUT.name_at(index) for index in range(11)] == ["a"] * 6 + ["scalar"] + ["b"] * 4
    assert Layout.flat(7, name="grad").name_at(6) == "grad"
    assert Layout.flat(MAX_NUMEL).numel == torch.iinfo(torch.int32).max


def test_views_and_pieces_share_memory_and_flatten_undoes_them() -> None:
    vector = torch.arange(11.0)
    views, pieces = LAYOUT.views(vector), LAYOUT.split(vector)
    assert [tuple(view.shape) for view in views.values()] == list(LAYOUT.shapes)
    views["a"][1, 2], pieces["b"][0] = 50.0, 70.0
    assert (vector[5], vector[7]) == (50.0, 70.0)
    flat = LAYOUT.flatten(views)
    assert torch.equal(flat, vector)
    flat[0] = -1.0
    assert vector[0] == 0.0


def test_what_a_layout_keeps_is_made_once_however_many_buckets_there_are() -> None:
    layouts, made = [Layout.flat(numel) for numel in range(1, 101)], list[tuple[int, int]]()

    def make(layout: Layout, factor: int) -> int:
        made.append((layout.numel, factor))
        return factor * layout.numel

    for _ in range(3):
        assert [layout.kept(make, 2) for layout in layouts] == [2 * layout.numel for layout in layouts]
    assert layouts[4].kept(make, 3) == 15
    assert made == [*((layout.numel, 2) for layout in layouts), (5, 3)]


@pytest.mark.parametrize(
    ("names", "shapes", "message"),
    [
        (("a", "b"), ((1,),), "one shape per name, got 2 names, 1 shapes"),
        (("a", "a"), ((1,), (1,)), "must be unique"),
        ((), (), rf"must be in \[1, {MAX_NUMEL}\], got 0"),
        (("a",), ((MAX_NUMEL + 1,),), f"got {MAX_NUMEL + 1}"),
    ],
)
def test_a_layout_is_checked_when_it_is_built(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(names, shapes)
