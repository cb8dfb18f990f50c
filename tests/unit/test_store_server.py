"""The store that ranks share is served at one address, not at all of this machine."""

import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from experiments.launching import launch
from experiments.launching.store_server import hold_port, serve_store
from experiments.training import rank_main

LIMIT = timedelta(seconds=300)


def test_a_store_is_served_at_its_address_alone() -> None:
    served = serve_store("127.0.0.1", 0, LIMIT)
    assert served is not None
    served.set("key", "value")
    assert TCPStore("127.0.0.1", served.port, is_master=False, timeout=LIMIT).get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", served.port), 10)  # this machine too, at another address


def test_a_server_that_torch_starts_on_the_port_is_the_same() -> None:
    served = serve_store("localhost", 0, LIMIT)
    assert served is not None
    served.set("key", "value")
    other = TCPStore("localhost", served.port, is_master=True, multi_tenant=True, wait_for_workers=False, timeout=LIMIT)
    assert other.get("key") == b"value"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "some-host", "10.0.0.999"])
def test_names_and_addresses_of_other_machines_are_left_to_torch(address: str) -> None:
    assert serve_store(address, 0, LIMIT) is None


def test_nothing_is_served_where_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert serve_store("127.0.0.1", taken.getsockname()[1], LIMIT) is None


@pytest.mark.skipif(sys.platform != "linux", reason="a port is held on Linux alone")
def test_a_store_is_served_at_a_port_that_is_held_and_nothing_else_takes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    held = hold_port(port)
    assert held is not None
    with held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    held = hold_port(port)
    assert held is not None
    with held:
        served = serve_store("127.0.0.1", port, LIMIT)
        assert served is not None
        own = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
        own.set("key", "value")
        assert served.get("key") == b"value"


@pytest.mark.skipif(sys.platform != "linux", reason="a port is held on Linux alone")
def test_torch_serves_a_store_at_a_port_that_is_held() -> None:
    held = hold_port(0)
    assert held is not None
    with held:
        TCPStore("localhost", held.getsockname()[1], is_master=True, wait_for_workers=False, timeout=LIMIT)


def test_a_port_that_is_taken_is_not_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert hold_port(taken.getsockname()[1]) is None


def test_a_launch_on_one_node_listens_on_the_loopback_address_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[str] = []

    def started(config: Any, _: str) -> Callable[..., None]:
        met.append(config.rdzv_endpoint)
        host, _, port = config.rdzv_endpoint.rpartition(":")
        assert host == "127.0.0.1"
        socket.create_connection(("127.0.0.1", int(port)), 10).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(port)), 10)
        return lambda *words: None

    monkeypatch.setattr(launch, "elastic_launch", started)
    launch.launch(tmp_path, module="none", nproc_per_node=2, run_id="one")
    assert len(met) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a port is held on Linux alone")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_launch_holds_the_port_of_the_store_of_its_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    variables = {"RANK": str(rank), "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def bind() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))

    def started(config: Any, _: str) -> Callable[..., None]:
        def run(*words: str) -> None:
            config.logs_specs.reify({0: variables})
            with pytest.raises(OSError, match="in use") if rank == 0 else nullcontext():
                bind()

        return run

    monkeypatch.setattr(launch, "elastic_launch", started)
    launch.launch(tmp_path, module="none", nproc_per_node=1, run_id="one")
    bind()


@pytest.mark.parametrize(
    ("rank", "agent_has_it", "serves"), [("0", "False", True), ("1", "False", False), ("0", "True", False)]
)
def test_rank_0_serves_the_store_unless_the_launcher_does(
    monkeypatch: pytest.MonkeyPatch, rank: str, agent_has_it: str, serves: bool
) -> None:
    given = {"RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_USE_AGENT_STORE": agent_has_it}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert (rank_main._served_store(LIMIT) is not None) == serves
