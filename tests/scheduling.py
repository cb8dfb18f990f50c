"""How pytest-xdist shares out the tests of one run.

The tests of a group stay on one worker, as with ``--dist loadgroup``, because they share processes. So do the tests
of a file, which share what they computed or prepared, but for those of tests/dist outside of a group.
"""

from collections import Counter

import pytest
from xdist.scheduler import LoadGroupScheduling

# Groups in the order in which they start. SLURM mostly waits while others compute.
GROUPS = ("slurm", "ranks", "four ranks", "fresh ranks", "hosts", "bad input")


class Scheduling(LoadGroupScheduling):
    """Share out groups, tests of tests/dist, and files."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        if scope != nodeid:
            return scope  # the group
        return nodeid.split("[")[0] if nodeid.startswith("tests/dist/") else nodeid.split("::")[0]


def order(items: list[pytest.Item]) -> None:
    """Put groups first and the unit tests last, those files first that have most cases: what ends a run is short.

    The group of a test is put into its id, where xdist looks for it. xdist 3.8 writes an id with a group to
    ``item._nodeid``, which pytest 9.2 no longer reads: without this, every worker starts the processes that the tests
    of a group share.
    """
    for item in items:
        written = vars(item).get("_nodeid")
        if written and written != item.nodeid:
            item._id = type(item._id).parse(written)  # type: ignore[attr-defined]
    num_cases = Counter(item.path for item in items)
    items.sort(key=lambda item: _place(item, num_cases[item.path]))


def _place(item: pytest.Item, num_cases: int) -> tuple[int, int]:
    mark = item.get_closest_marker("xdist_group")
    if mark:
        group = mark.args[0]
        if group not in GROUPS:
            raise pytest.UsageError(
                f"{item.nodeid}: group {group!r} has no place in tests/scheduling.py: {', '.join(GROUPS)}"
            )
        return GROUPS.index(group), 0
    return (len(GROUPS) + 1, -num_cases) if item.nodeid.startswith("tests/unit/") else (len(GROUPS), 0)
