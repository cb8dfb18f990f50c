"""Training on several hosts: by torchrun and by our own launcher, and the message when one of them dies."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from experiments.tools.ranks.group import GroupError, RankGroup
from experiments.tools.ranks.hosts import Hosts, unavailable
from tests.dist.rank_functions import add, add_but_one
from tests.net import on_hosts
from tests.net.on_hosts import Exit, run
from tests.waiting import LIMIT_S, wait_until

REASON = unavailable()
NUM_HOSTS = 3
NUM_TRAINING = 2  # so many train: each one starts a process
WORDS = ["-m", "experiments.train", "model=mlp", "dataset=digits", "batch_size=64", "epochs=1"]

pytestmark = [
    pytest.mark.net,
    pytest.mark.xdist_group("hosts"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(NUM_HOSTS, "1gbit") as made:
        yield made


def check_run(ended: list[Exit], output: Path) -> None:
    assert [one.code for one in ended] == [0] * NUM_TRAINING, ended
    (folder,) = output.iterdir()
    assert (folder / "DONE").exists()
    assert json.loads((folder / "manifest.json").read_text())["world_size"] == NUM_TRAINING
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert steps
    assert all(row["bytes_sent"] > 0 for row in steps)


def test_torchrun_trains_on_several_hosts(hosts: Hosts, tmp_path: Path) -> None:
    def command(rank: int) -> list[str]:
        nodes = [f"--nnodes={NUM_TRAINING}", f"--node-rank={rank}", "--nproc-per-node=1"]
        meeting = [f"--master-addr={hosts.addresses[0]}", "--master-port=29500"]
        return ["-m", "torch.distributed.run", *nodes, *meeting, *WORDS, f"output={tmp_path}"]

    check_run(run(hosts, [command(rank) for rank in range(NUM_TRAINING)]), tmp_path)


def test_the_same_command_on_every_host_trains_one_model(hosts: Hosts, tmp_path: Path) -> None:
    """The hosts share a disk, and so the folder of the run: one of them owns it."""
    nodes = ["cluster=nodes", f"cluster.nnodes={NUM_TRAINING}", f"cluster.rdzv_endpoint={hosts.names[0]}:29500"]
    ended = run(hosts, [[*WORDS, *nodes, f"output={tmp_path}"]] * NUM_TRAINING)
    check_run(ended, tmp_path)
    assert [one.output.count("done: ") for one in ended] == [1] * NUM_TRAINING


@pytest.mark.parametrize("knows_itself", [True, False], ids=["127.0.1.1", "unknown"])
def test_the_machines_own_names_do_not_matter(hosts: Hosts, tmp_path: Path, knows_itself: bool) -> None:
    """As on Debian, where a host's own name is 127.0.1.1 there; or it knows no name at all."""
    files = [Path("/etc/netns") / prefix[3] / "hosts" for prefix in hosts.prefixes()]
    before = [file.read_text() for file in files]
    for name, file in zip(hosts.names, files, strict=True):
        file.write_text("127.0.0.1 localhost\n" + (f"127.0.1.1 {name}\n" if knows_itself else ""))
    nodes = ["cluster=nodes", f"cluster.nnodes={NUM_TRAINING}", f"cluster.rdzv_endpoint={hosts.addresses[0]}:29502"]
    try:
        ended = run(hosts, [[*WORDS, *nodes, "cluster.timeout_s=100", f"output={tmp_path}"]] * NUM_TRAINING)
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    check_run(ended, tmp_path)


def test_a_rank_on_a_host_that_dies_fails_the_others_with_a_message(hosts: Hosts) -> None:
    with RankGroup(NUM_HOSTS, prefixes=hosts.prefixes(), env={"OMP_NUM_THREADS": "1"}) as ranks:
        assert ranks.call(socket.gethostname) == list(hosts.names)
        assert ranks.call(add, 2.0) == [2.0 * NUM_HOSTS] * NUM_HOSTS
        started = time.monotonic()
        with pytest.raises(GroupError, match=r"^rank 2 failed: killed by SIGKILL") as caught:
            ranks.call(add_but_one, 2, "die")
    assert caught.value.rank == 2
    assert time.monotonic() - started < LIMIT_S / 2


@pytest.mark.timeout(1200)
def test_a_host_that_vanishes_ends_the_run_and_its_rank_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """The launcher that is cut off from the store of all may wait for the kernel, and is ended here."""
    limit_s, cut = 40, NUM_TRAINING - 1
    nodes = ["cluster=nodes", f"cluster.nnodes={NUM_TRAINING}", f"cluster.rdzv_endpoint={hosts.names[0]}:29501"]
    words = [*WORDS[:-1], "epochs=100000", *nodes, f"cluster.timeout_s={limit_s}", f"output={tmp_path / 'runs'}"]
    with ExitStack() as closing:
        logs = [closing.enter_context((tmp_path / f"log{host}").open("w")) for host in range(NUM_TRAINING)]
        started = [on_hosts.start(hosts, host, words, stdout=log, stderr=log) for host, log in enumerate(logs)]
        for process in started:
            closing.callback(process.kill)
        wait_until(lambda: any((tmp_path / "runs").glob("*/steps.jsonl")), "the first step")
        closing.enter_context(on_hosts.cut(hosts, cut))
        assert started[0].wait(limit_s + LIMIT_S) == 1  # the limit, and the time for an overloaded machine to end
    (line,) = [line for line in (tmp_path / "log0").read_text().splitlines() if ": step " not in line]
    assert f"rank {cut} failed: " in line
