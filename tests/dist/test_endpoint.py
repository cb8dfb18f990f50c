"""Where nodes meet: whatever the names of machines are, and in separate words why they do not."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config.errors import UserError
from experiments.launching import endpoint
from experiments.launching.endpoint import Endpoint, endpoint_of
from tests.dist.commands import ROOT, run
from tests.ports import free_port
from tests.refusals import refused
from tests.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.dist
ABSENT = "192.0.2.1"  # RFC 5737: no machine has it


def test_an_address_of_this_machine_is_here_and_no_other() -> None:
    for host, is_here in (("localhost", True), ("127.0.0.1", True), ("127.0.1.1", True), (ABSENT, False)):
        found = endpoint_of(host, 29400)
        assert found.is_here == is_here
        assert (found.address == host) == is_here


def test_an_absent_node_and_a_port_in_use_have_different_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "ANSWER_S", 1.0)
    absent = Endpoint("127.0.0.1", free_port(), is_here=False, address="", interface=None)
    refused(lambda: absent.wait(0.0), "nothing answered", "start the run", error=UserError)
    with socket.create_server(("", 0)) as other:
        used = endpoint_of("localhost", other.getsockname()[1])
        refused(lambda: used.wait(0.0), "in use by another program", error=UserError)
    endpoint_of("localhost", free_port()).wait(0.0)  # will be served here


def test_sigterm_ends_a_launcher_that_waits_for_an_absent_node_at_once(tmp_path: Path) -> None:
    nodes = ["cluster=nodes", "cluster.nnodes=2", f"cluster.rdzv_endpoint={ABSENT}:29400", f"output={tmp_path}"]
    words = ["-m", "experiments.train", "model=mlp", "dataset=synthetic", "batch_size=64", "epochs=1", *nodes]
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_until(lambda: any(tmp_path.glob("*/ranks/agent.log")), "the launcher")
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(LIMIT_S / 5) == 128 + signal.SIGTERM
        finally:
            launcher.kill()


@pytest.mark.parametrize(
    ("rank", "host", "words"),
    [
        (1, "no-such-host.invalid", "not known here"),
        (1, "localhost", "rank 0 did not answer"),
        (0, "localhost", "not all ranks joined"),
        (0, "used", "the port is in use"),
    ],
)
def test_ranks_that_do_not_meet_say_why(rank: int, host: str, words: str, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1] if host == "used" else free_port()
        environ = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}
        settings = ["model=mlp", "dataset=synthetic", "batch_size=64", "cluster.timeout_s=5", f"output={tmp_path}"]
        ran = run(*settings, MASTER_ADDR=host.replace("used", "localhost"), **environ)
    assert ran.returncode == 1
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("error")]
    assert words in line
