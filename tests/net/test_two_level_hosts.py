"""Two hosts of two ranks: the kernel counts what crosses from host to host: the sparse part alone, each list once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.tools.ranks.hosts import Hosts, unavailable
from tests.net.on_hosts import run

WORKER = Path(__file__).parent / "workers/two_level.py"
REASON = unavailable()
NUMEL, NUM_STEPS = 4_000_000, 4
COUNTS = (950_000, 1_050_000, 1_000_000, 1_000_000)  # elements of the lists that all ranks gather

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
    words = [str(WORKER), str(NUMEL), str(NUM_STEPS), *map(str, COUNTS)]
    ended = run(hosts, [words] * 4, per_host=2, as_ranks=True)
    assert [one.code for one in ended] == [0] * 4, ended
    counted, lists = zip(*(map(float, one.output.split()[-2:]) for one in ended), strict=True)
    assert lists == (0.0, 4.0 * 3 * max(COUNTS)) * 2  # sent pairwise, a host's ranks would send each list twice
    dense = 4 * NUMEL * NUM_STEPS  # of a host's two shards, all-reduced with one other host: 2 (n - 1) / n = 1
    for host, (now, then) in enumerate(zip(hosts.counters(), before, strict=True)):
        expected = counted[2 * host] + counted[2 * host + 1]
        assert expected < 0.05 * dense
        assert (now - then).payload_bytes == pytest.approx(expected + lists[2 * host + 1], abs=200_000)
