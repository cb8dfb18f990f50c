"""Where ranks and nodes meet is checked before they do: who listens there, and whether this machine can."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from experiments.config.errors import UserError
from experiments.launching import launch as launching
from experiments.launching import meeting
from experiments.launching.meeting import check_endpoint, check_master
from experiments.launching.rank_environment import RankEnvironment
from experiments.runs.stop_signals import stop_signals
from tests.ports import free_port

HERE = "127.0.0.1"
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
IN_USE = r"port \d+ is in use on this machine"


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """Yield the port of a server that answers each client with ``answer``, or never where that is None."""
    with socket.create_server((HERE, 0)) as server:
        kept = []

        def serve() -> None:
            with suppress(OSError):  # the server is closed
                while True:
                    connection, _ = server.accept()
                    kept.append(connection)
                    if answer is not None:
                        connection.recv(64)
                        connection.sendall(answer)
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        for connection in kept:
            connection.close()


@contextmanager
def store() -> Iterator[int]:
    found = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    yield found.port
    del found  # it listens as long as it lives


def host_of_two(port: int) -> None:
    check_endpoint(HERE, port, nnodes=2, key="rdzv_endpoint")


def only_host(port: int) -> None:
    check_endpoint(HERE, port, nnodes=1, key="rdzv_endpoint")


def rank(number: int, **environ: str) -> Callable[[int], None]:
    return lambda port: check_master(RankEnvironment(number, 2, number, HERE, port), environ)


FOREIGN = {"http": b"HTTP/1.1 400 Bad Request\r\n\r\n", "closes": b"", "silent": None}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize(
    ("check", "message"),
    [
        (host_of_two, IN_USE),
        (only_host, IN_USE),
        (rank(0), IN_USE + "; set MASTER_PORT to a free port"),
        (rank(1), f"^MASTER_ADDR={HERE} MASTER_PORT=\\d+: something that .* listens there; name a free port"),
        (rank(0, **AGENT), "listens there"),
    ],
    ids=["host", "only host", "rank 0", "rank 1", "rank 0 of torchrun"],
)
def test_a_foreign_listener_is_named(
    kind: str, check: Callable[[int], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_S", 0.3)
    monkeypatch.setattr(meeting, "_SILENT_S", 0.1)
    with listener(FOREIGN[kind]) as port, pytest.raises(UserError, match=message) as caught:
        check(port)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("check", [host_of_two, rank(1), rank(0, **AGENT)])
def test_a_store_is_joined(check: Callable[[int], None]) -> None:
    """Torch answers to what this module says: with another version's protocol this test fails, and nothing else."""
    with store() as port:
        assert meeting._ask_one(HERE, port) is meeting.Answer.STORE
        check(port)


@pytest.mark.parametrize("check", [host_of_two, only_host, rank(0)])
def test_a_free_port_is_taken(check: Callable[[int], None]) -> None:
    check(free_port())


def test_a_late_host_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(meeting, "_QUIET_S", 0.0)
    monkeypatch.setattr(meeting, "_is_of_this_machine", lambda address: False)
    port, begun = free_port(), []

    def start_late(seconds: float) -> None:
        if not begun:
            begun.append(TCPStore(HERE, port, is_master=True, wait_for_workers=False))

    monkeypatch.setattr(meeting.time, "sleep", start_late)
    host_of_two(port)
    assert begun
    assert capsys.readouterr().err == f"waiting for rdzv_endpoint={HERE}:{port}, which may start within 600 s\n"


def test_a_host_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = RankEnvironment(1, 2, 0, HERE, free_port())
    with pytest.raises(UserError, match=r"nobody listened there for 0.01 s; is that host's command running\?$"):
        check_master(ranks, {}, wait_s=0.01)
    monkeypatch.setattr(meeting, "_is_of_this_machine", lambda address: False)
    check_endpoint(HERE, ranks.master_port, nnodes=2, key="rdzv_endpoint", wait_s=0)  # it is waited for later
    with pytest.raises(UserError, match="must be an address of this machine, the only node; leave it out"):
        only_host(ranks.master_port)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300])
def test_an_unknown_host_is_named(host: str) -> None:
    with pytest.raises(UserError, match=rf"^MASTER_ADDR={host} .*: the host '{host}' is not known here \("):
        check_master(RankEnvironment(0, 2, 0, host, 29500), {})
    with pytest.raises(UserError, match="is not known here"):
        check_endpoint(host, 29500, nnodes=2, key="rdzv_endpoint")


def test_names_that_are_not_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_NAMED_S", 0.01)
    answered = threading.Event()
    monkeypatch.setattr(meeting.socket, "getaddrinfo", lambda *_, **__: [answered.wait(60)][:0])
    with pytest.raises(UserError, match=r"not known here \(no answer within 0.01 s\)"):
        only_host(29500)
    answered.set()


def test_torch_with_another_protocol_decides_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_S", 0.3)
    monkeypatch.setattr(meeting, "_SILENT_S", 0.1)
    monkeypatch.setattr(meeting, "_knows_protocol", lambda: False)
    with listener(None) as port:
        rank(1)(port)


def test_a_command_too_many_says_that_the_nodes_met_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's agent then returns no result, and reads it."""
    monkeypatch.setattr(launching, "elastic_launch", lambda *_: lambda *_: getattr(None, "is_failed"))  # noqa: B009
    with pytest.raises(UserError, match=r"met at .* without this one, and have ended: start the run once on each node"):
        launching.launch(tmp_path, module="none", nproc_per_node=1, run_id="run")


def test_ctrl_c_ends_the_wait_for_another_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "check_endpoint", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    settings = {"module": "none", "nproc_per_node": 1, "nnodes": 2, "rdzv_endpoint": "node1:29500", "run_id": "run"}
    with stop_signals.recorded(), pytest.raises(KeyboardInterrupt):
        launching.launch(tmp_path, **settings)  # type: ignore[arg-type]
