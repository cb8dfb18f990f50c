"""Start the ranks of a run on this node, supervise them, and report in one line why they failed.

torch's elastic agent starts and supervises the processes. This module adds what the agent does not do: a stop signal
lets the ranks save first, for as long as that takes; no rank outlives this process, the agent prints nothing on the
terminal, and the reported rank is the one that caused the failure.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from experiments.config.endpoints import host_and_port
from experiments.config.errors import UserError
from experiments.config.schema import TIMEOUT_S
from experiments.config.start_up import LOG_LEVEL, log_level_of_ranks
from experiments.config.stopping import raise_stop
from experiments.launching.child_environment import num_cores, with_python_path
from experiments.launching.failure_records import record_failure
from experiments.launching.failures import RankFailure, short_line
from experiments.launching.full_disks import LossyLog, spare_reports
from experiments.launching.meeting import check_endpoint
from experiments.launching.rank_process import LAUNCHER_PID, SPARE_REPORTS, TIMEOUT, report_path, saves_path
from experiments.launching.store_server import LOOPBACK, hold_port, serve_store
from experiments.launching.watching.beats import rank_folder
from experiments.launching.watching.launch_watch import LaunchWatch
from experiments.runs.atomic_files import disk_errors
from experiments.runs.run_folder import RunFolder
from experiments.runs.stop_signals import stop_signals

_AGENT_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)
_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")


def launch(
    run_dir: Path,
    *,
    module: str,
    nproc_per_node: int,
    nnodes: int = 1,
    rdzv_endpoint: str = "localhost:0",
    run_id: str,
    max_restarts: int = 0,
    timeout_s: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run ``python -u -m module run_dir`` on every local rank; wait until all have finished, or were stopped.

    The output of a rank is in ``ranks/rank<r>/{stdout,stderr}.log`` of the run folder and nowhere else. Each of
    several nodes calls this function once, with the same folder.

    Args:
        run_dir: An existing folder, claimed by the caller.
        module: Name of the worker's module; it gets the folder as its only argument.
        nproc_per_node: Ranks to start here.
        nnodes: Nodes that take part, this one included.
        rdzv_endpoint: ``host:port`` where the nodes meet, the host being one of them; port 0 takes a free one, for a
            single node.
        run_id: The same on all nodes of a run, and different for each run at the same endpoint.
        max_restarts: How often all ranks are started again, after one of them failed.
        timeout_s: Time limit of the ranks' collectives in seconds, which the ranks set themselves. When a rank stands
            still or a node is gone, all ranks are ended within it; watching/stalls.py and host_watch.py have the rules.
        env: Environment variables of the workers, added to those of this process. If OMP_NUM_THREADS is in neither,
            each rank gets an equal share of the cores.

    Raises:
        RankFailure: A rank failed; ``failure.json`` in the run folder lists all failures.
        UserError: An argument is out of its range, or the nodes could not meet.
        SystemExit: SIGHUP or SIGQUIT was received, with code 128 + its number; all ranks were stopped. After a stop
            signal, ``stop_signals.number`` has it.
        Interrupted, Stopped: a stop signal came before ranks were started, for instance in the wait for other nodes.
    """
    with stop_signals.recorded(then=lambda: raise_stop(stop_signals.number, None)):  # it waits for the other nodes
        _check(nproc_per_node, nnodes, rdzv_endpoint)
    run_dir = run_dir.resolve()
    folder = RunFolder(run_dir)
    with disk_errors(folder.ranks_path):
        folder.ranks_path.mkdir(exist_ok=True)
        if nnodes == 1:
            _clear_reports(folder)
    with (
        spare_reports() as spare,
        disk_errors(folder.path),
        _meeting_place(rdzv_endpoint, nnodes, timeout_s) as endpoint,
    ):
        watch = LaunchWatch(run_dir, timeout_s, endpoint=endpoint, run_id=run_id)
        ranks = _Ranks(folder, watch)
        config = LaunchConfig(
            min_nodes=nnodes,
            max_nodes=nnodes,
            nproc_per_node=nproc_per_node,
            run_id=run_id,
            rdzv_backend="c10d",
            rdzv_endpoint=endpoint,
            rdzv_configs={"read_timeout": max(60, round(timeout_s))},  # the watch over the hosts comes before that
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=ranks,
            local_addr=LOOPBACK if nnodes == 1 else None,  # a laptop's own name often does not resolve
            signals_to_handle=",".join(number.name for number in _agent_signals()) or "none",
        )
        command = ("-u", "-m", "experiments.launching.rank_process", module, str(run_dir))
        variables = _worker_variables(nproc_per_node, {**(env or {}), TIMEOUT: str(timeout_s)})
        variables |= {SPARE_REPORTS: str(spare)} if spare else {}
        with (
            _environment(variables),
            _agent_log(folder),
            _failures(folder, spare, rdzv_endpoint, watch),
            _agent_signals_restored(),
            stop_signals.recorded(then=ranks.stop),
            closing(ranks),
            watch,
        ):
            elastic_launch(config, sys.executable)(*command)


class _Ranks(LogsSpecs):
    """The ranks of this node: a folder for each, named by its global rank, and what a stop signal does to them."""

    def __init__(self, folder: RunFolder, watch: LaunchWatch) -> None:
        super().__init__(log_dir=str(folder.ranks_path), redirects=Std.ALL)
        self._folder, self._watch = folder, watch
        self._ranks: list[int] = []
        self._held: socket.socket | None = None  # at the port of the ranks' store

    @property
    def root_log_dir(self) -> str:
        return str(self._folder.ranks_path)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        folders = {local_rank: rank_folder(self._folder.path, int(env["RANK"])) for local_rank, env in envs.items()}
        for path in folders.values():
            path.mkdir(parents=True, exist_ok=True)
        self._ranks = [int(env["RANK"]) for env in envs.values()]
        self.close()
        if 0 in self._ranks:
            self._held = hold_port(int(next(iter(envs.values()))["MASTER_PORT"]))
        for rank in self._ranks:
            saves_path(self._folder.path, rank).unlink(missing_ok=True)
            report_path(self._folder.path, rank).unlink(missing_ok=True)  # of the start before this one
        if stop_signals.number:  # the ranks that it was passed on to have failed
            self.stop()
        self._watch.start(envs.values())  # the agent calls this before each start of the ranks
        return LogsDest(
            stdouts={local_rank: str(path / "stdout.log") for local_rank, path in folders.items()},
            stderrs={local_rank: str(path / "stderr.log") for local_rank, path in folders.items()},
            error_files={local_rank: str(path / "error.json") for local_rank, path in folders.items()},
        )

    def close(self) -> None:
        """Let go of the port of the ranks' store."""
        if self._held:
            self._held.close()

    def stop(self) -> None:
        """Have the ranks save and end; where not all of them take steps yet, end them at once."""
        if not self._ranks or not all(saves_path(self._folder.path, rank).exists() for rank in self._ranks):
            raise SignalException("a stop signal, and nothing to save", signal.SIGKILL)
        for pid in self._watch.own_ranks().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _check(nproc_per_node: int, nnodes: int, rdzv_endpoint: str) -> None:
    for name, value in (("nproc_per_node", nproc_per_node), ("nnodes", nnodes)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    host, port = host_and_port(rdzv_endpoint, key="rdzv_endpoint", nnodes=nnodes)
    if port or nnodes > 1:
        check_endpoint(host, port, nnodes=nnodes, key="rdzv_endpoint")


def _clear_reports(folder: RunFolder) -> None:
    """Remove the failure reports of an earlier launch in the same folder."""
    for path in (folder.failure_path, *folder.errors_path.glob("rank*.json")):
        path.unlink(missing_ok=True)


def _worker_variables(nproc_per_node: int, env: Mapping[str, str]) -> dict[str, str]:
    given = {**os.environ, **env}
    return {
        "OMP_NUM_THREADS": given.get("OMP_NUM_THREADS") or str(max(1, num_cores() // nproc_per_node)),
        **env,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # each start of the ranks gets a store of its own
        "PYTHONPATH": with_python_path(given)["PYTHONPATH"],  # the caller may have changed its working directory
        LAUNCHER_PID: str(os.getpid()),
        LOG_LEVEL: log_level_of_ranks(),
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process while the context lasts; the agent passes them to its workers."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _meeting_place(rdzv_endpoint: str, nnodes: int, timeout_s: float) -> Iterator[str]:
    """Yield HOST:PORT where the nodes meet; where this process has the store, it listens at that address alone."""
    host, port = host_and_port(rdzv_endpoint, key="rdzv_endpoint", nnodes=nnodes)
    address = LOOPBACK if nnodes == 1 else host
    store = serve_store(address, port, timedelta(seconds=timeout_s))
    yield f"{address}:{store.port}" if store else rdzv_endpoint


@contextmanager
def _failures(folder: RunFolder, spare: Path | None, rdzv_endpoint: str, watch: LaunchWatch) -> Iterator[None]:
    """Raise what ``launch`` promises in place of the agent's exceptions."""
    try:
        yield
    except SignalException as stop:
        if not stop_signals.number:
            # SignalException is an Exception: a sweep would count a failed run and start the next one.
            raise SystemExit(128 + stop.sigval) from None
    except (RendezvousError, DistError) as error:
        if watch.has_started:  # the store is gone, with the node that had it
            raise RankFailure(record_failure(folder, {}, watch, spare=spare)) from None
        if not isinstance(error, RendezvousError):
            raise
        message = f"the nodes could not meet at {rdzv_endpoint}: {short_line(str(error))}; check host and port"
        raise UserError(message) from None
    except AttributeError as error:
        if error.name != "is_failed":  # else the agent has no result: the nodes met without it, and have ended
            raise
        message = f"the nodes met at {rdzv_endpoint} without this one, and have ended: start the run once on each node"
        raise UserError(message) from None
    except ChildFailedError as error:
        raise RankFailure(record_failure(folder, error.failures, watch, spare=spare)) from None


@contextmanager
def _agent_log(folder: RunFolder) -> Iterator[None]:
    """Write the agent's log to ``ranks/launcher.log``: the user gets one line with the failure instead."""
    handler = LossyLog(folder.ranks_path / "launcher.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in _AGENT_LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(handler)
        handler.close()


def _agent_signals() -> list[signal.Signals]:
    """Return the signals at which the agent ends the ranks; nohup has SIGHUP ignored."""
    return [number for number in _AGENT_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def _agent_signals_restored() -> Iterator[None]:
    """Restore the handlers that the agent replaced."""
    if threading.current_thread() is not threading.main_thread():
        yield  # the agent sets no handlers either
        return
    before = {number: signal.getsignal(number) for number in _AGENT_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
