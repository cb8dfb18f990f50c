"""Two hosts of two ranks: the kernel counts what crosses from host to host: the sparse part alone, each list once."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.ranks.hosts import Hosts, unavailable
from tests.net.on_hosts import start
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "workers/two_level.py"
REASON = unavailable()
NUMEL, NUM_STEPS = 4_000_000, 4
COUNTS = (950_000, 1_050_000, 1_000_000, 1_000_000)  # of the lists that all ranks gather

pytestmark = [
    pytest.mark.net,
    pytest.mark.xdist_group("hosts"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, "1gbit") as made:
        yield made


def test_only_what_is_sparse_crosses_from_host_to_host(hosts: Hosts) -> None:
    """The kernel sees what the ranks counted between nodes, and the meeting of the ranks."""
    before = hosts.counters()
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "4"}
    meeting = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500"}
    started = [
        start(
            hosts,
            rank // 2,
            [sys.executable, str(WORKER), str(NUMEL), str(NUM_STEPS), *map(str, COUNTS)],
            {**common, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    ended = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4, ended
    counted = [float(output.split()[-2]) for output in ended]
    lists = [float(output.split()[-1]) for output in ended]
    assert lists == [0.0, 4.0 * 3 * max(COUNTS)] * 2  # sent pairwise, a host's ranks would send each list twice
    dense = 4 * NUMEL * NUM_STEPS  # of a host's two shards, all-reduced with one other host: 2 (n - 1) / n = 1
    for host, (now, then) in enumerate(zip(hosts.counters(), before, strict=True)):
        expected = counted[2 * host] + counted[2 * host + 1]
        assert expected < 0.05 * dense
        everything = expected + lists[2 * host + 1]
        assert (now - then).payload_bytes == pytest.approx(everything, abs=200_000)
