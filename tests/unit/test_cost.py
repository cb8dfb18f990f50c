"""The table of what the tests cost."""

from tests.cost import table


def test_folders_are_in_the_order_of_their_cost() -> None:
    cases = [("tests.unit.test_a", "test_x[1-2]", 0.5), ("tests.unit.test_b", "test_y", 1.0)]
    lines = list(table([*cases, ("tests.dist.test_c", "test_z[a]@ranks", 90.4)]))
    assert lines[2:] == ["| `tests/dist` | 1 | 90 | `test_z`, 90 s |", "| `tests/unit` | 2 | 2 | `test_y`, 1 s |"]
