"""What holds for all tests: signals, which tests share a worker of pytest-xdist, and a group of one rank."""

import os
import signal
from collections.abc import Iterator

import pytest

# The groups of tests that xdist keeps on one worker, the first to start first: SLURM mostly waits while others compute.
GROUPS = ("slurm", "ranks", "hosts")

# Workers of the tests and the ranks in them fill the cores; a second thread in each tensor operation of this size only
# makes them wait for each other. Processes that tests start inherit it. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Heed SIGINT, which nohup and background jobs ignore: processes that tests start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make the process of the test the only rank of a torch.distributed group."""
    import torch.distributed as dist  # not above: workers that run no such test do not pay for it

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of a group together, the groups first, and their group into their ids, where xdist looks for it.

    xdist 3.8 writes an id with a group to ``item._nodeid``, which pytest 9.2 no longer reads: without this, every
    worker starts the processes that the tests of a group share.
    """
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        written = vars(item).get("_nodeid")
        if written and written != item.nodeid:
            item._id = type(item._id).parse(written)  # type: ignore[attr-defined]
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    mark = item.get_closest_marker("xdist_group")
    return GROUPS.index(mark.args[0]) if mark and mark.args[0] in GROUPS else len(GROUPS)
