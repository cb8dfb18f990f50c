"""How pytest-xdist shares out the tests of one run.

The tests of a group stay on one worker, as with ``--dist loadgroup``, because they share processes. So do the tests
of a file of tests/tools, which share prepared runs, and the cases of any other test: a unit of work for each case
would cost more than many cases take.
"""

import pytest
from xdist.scheduler import LoadGroupScheduling

# Groups in the order in which they start. SLURM mostly waits while others compute.
GROUPS = ("slurm", "ranks", "four ranks", "hosts")


class Scheduling(LoadGroupScheduling):
    """Share out groups, files of tests/tools, and tests with all their cases."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        if scope != nodeid:
            return scope  # the group
        return nodeid.split("::")[0] if nodeid.startswith("tests/tools/") else nodeid.split("[")[0]


def order(items: list[pytest.Item]) -> None:
    """Put the tests of a group together, the groups first, and their group into their ids, where xdist looks for it.

    xdist 3.8 writes an id with a group to ``item._nodeid``, which pytest 9.2 no longer reads: without this, every
    worker starts the processes that the tests of a group share.
    """
    for item in items:
        written = vars(item).get("_nodeid")
        if written and written != item.nodeid:
            item._id = type(item._id).parse(written)  # type: ignore[attr-defined]
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    mark = item.get_closest_marker("xdist_group")
    return GROUPS.index(mark.args[0]) if mark else len(GROUPS)
