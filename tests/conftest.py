"""What holds for all tests: signals, garbage collection, what workers of pytest-xdist run, a group of one rank."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest

gc.disable()  # until all tests are collected: imports and collection leave no garbage, and looking for it takes seconds

# Workers of the tests and the ranks in them fill the cores; a second thread in each tensor operation of this size only
# makes them wait for each other. Processes that tests start inherit it. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Heed SIGINT, which nohup and background jobs ignore: processes that tests start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.add_cleanup(gc.unfreeze)  # libraries report what is left at the end as a leak


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make the process of the test the only rank of a torch.distributed group."""
    import torch.distributed as dist  # not above: workers that run no such test do not pay for it

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect garbage from here on, but not among what was imported and collected.

    Whatever imports Triton meanwhile, tests/unit/test_triton_kernels.py needs its interpreter. Triton looks at the
    variable when it is imported and when a kernel is defined; processes that a test starts later compile.
    """
    is_given = "TRITON_INTERPRET" in os.environ
    os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        return (yield)
    finally:
        if not is_given:
            del os.environ["TRITON_INTERPRET"]
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests first that take long."""
    if getattr(config.option, "loadgroup", False):
        from tests.scheduling import order

        order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share out the tests as tests/scheduling.py says."""
    if config.getvalue("dist") == "loadgroup":
        from tests.scheduling import Scheduling

        return Scheduling(config, log)
    return None
