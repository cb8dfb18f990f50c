"""Start the ranks of a run on this node with torch's elastic agent, and report a failure in one line.

The agent starts, restarts and ends the processes, redirects their output, and forwards signals. This module passes the
run's settings, keeps the agent's log off the terminal, and finds the rank that failed first.
"""

import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hydra.core.utils import env_override
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from experiments.config.errors import UserError
from experiments.config.ranges import host_and_port
from experiments.config.schema import ClusterConfig
from experiments.config.stopping import STOP_SIGNALS, exit_code, handled, stop_signals
from experiments.launching.failures import (
    Failure,
    RankFailure,
    cause_of,
    failure_of_process,
    short_line,
    write_failure,
)
from experiments.launching.rank_environment import LAUNCHER_PID, TERMINAL, num_cores, with_python_path
from experiments.launching.stalls import furthest_behind, read_notes
from experiments.runs.files import disk_errors
from experiments.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from experiments.launching.endpoint import Endpoint

_AGENT_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)
_GRACE_S = 30  # for the ranks to end at a signal, at least: the agent's own time


def start_ranks(folder: RunFolder, module: str, cluster: ClusterConfig, *, env: Mapping[str, str] | None = None) -> int:
    """Run ``python -m module FOLDER`` on every local rank; wait until all have finished, or were stopped.

    The output of the ranks is below ``ranks/`` of the run folder. Each of several nodes calls this function once, for a
    run of the same name.

    Args:
        env: environment variables of the ranks. Without OMP_NUM_THREADS each gets an equal share of the cores.

    Returns:
        0, or the stop signal that ended the ranks, which have had the time to save.

    Raises:
        RankFailure: A rank failed; ``failure.json`` in the run folder says why.
        UserError: The nodes could not meet.
        SystemExit: SIGHUP or SIGQUIT was received, with code 128 + its number; all ranks were stopped.
    """
    path, started = folder.path.resolve(), time.time()
    heeded = [number.name for number in _AGENT_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # not nohup's
    logs, endpoint = _Logs(log_dir=str(path / "ranks"), redirects=Std.ALL), _endpoint(cluster)
    config = LaunchConfig(
        min_nodes=cluster.nnodes,
        max_nodes=cluster.nnodes,
        nproc_per_node=cluster.nproc_per_node,
        run_id=folder.path.name,
        rdzv_backend="c10d",
        max_restarts=cluster.max_restarts,
        logs_specs=logs,
        **_meeting_place(endpoint),
        **_time_to_save(cluster.slurm.signal_s),
        signals_to_handle=",".join(heeded) or "none",
    )
    try:
        with (
            disk_errors(folder.path),
            env_override(_variables(cluster, env or {}, endpoint)),
            _agent_log(folder),
            handled(_pass_on, _AGENT_SIGNALS),  # the agent replaces the handler, and restores none
            stop_signals.recorded(then=lambda number: _pass_on(number, None)),  # as the agent, but for a second Ctrl-C
        ):
            if endpoint is not None:
                endpoint.wait(cluster.timeout_s)
            elastic_launch(config, sys.executable)("-u", "-m", module, str(path))
    except SignalException as stop:
        if stop.sigval not in STOP_SIGNALS:
            raise SystemExit(128 + stop.sigval) from None
        return int(stop.sigval)
    except (RendezvousError, DistError) as error:
        raise UserError(_not_met(cluster, error, met_before=bool(logs.stderr))) from None
    except ChildFailedError as error:
        codes = {process.exitcode for process in error.failures.values()}
        numbers = [number for number in STOP_SIGNALS if exit_code(number) in codes]
        if codes == {exit_code(number) for number in numbers}:  # ranks that were signalled themselves
            return int(numbers[0])
        raise RankFailure(_cause(folder, error, logs.stderr, started)) from None
    return 0


def _endpoint(cluster: ClusterConfig) -> "Endpoint | None":
    """Return where several nodes meet; None for one node alone."""
    if cluster.nnodes == 1:
        return None
    from experiments.launching.endpoint import endpoint_of  # few runs have several nodes

    return endpoint_of(*host_and_port(cluster.rdzv_endpoint, key="cluster.rdzv_endpoint", nnodes=cluster.nnodes))


def _meeting_place(endpoint: "Endpoint | None") -> dict[str, Any]:
    """Return the agent's settings of where it meets others; by itself it asks for the own name, which may be unknown.

    At localhost it serves the store, for all addresses, or uses that of another agent on this machine.
    """
    if endpoint is None:
        return {"rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    if endpoint.is_here:
        return {"rdzv_endpoint": f"localhost:{endpoint.port}", "local_addr": endpoint.address}
    place = f"{endpoint.host}:{endpoint.port}"
    return {"rdzv_endpoint": place, "rdzv_configs": {"is_host": False}, "local_addr": endpoint.address or None}


def _not_met(cluster: ClusterConfig, error: Exception, *, met_before: bool) -> str:
    """Return in words why the nodes did not meet."""
    where = f"at cluster.rdzv_endpoint={cluster.rdzv_endpoint}"
    if isinstance(error, RendezvousTimeoutError) and not met_before:
        return f"not all {cluster.nnodes} nodes joined {where}: start the run on each, with the same settings"
    words = f"the nodes {'lost each other' if met_before else 'could not meet'} {where}: {short_line(str(error))}"
    return f"{words}; check host, port, and the output of the other nodes"


def _time_to_save(signal_s: int) -> dict[str, Any]:
    """Return the setting of how many seconds ranks have to save; the agent of torch 2.11 has none, and gives 30."""
    key = "shutdown_timeout"
    return {key: max(_GRACE_S, signal_s)} if key in inspect.signature(LaunchConfig).parameters else {}


class _Logs(DefaultLogsSpecs):
    """Where the agent has put the output of the ranks."""

    stderr: Mapping[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = super().reify(envs)
        self.stderr = found.stderrs
        return found


def _pass_on(number: int, frame: object) -> None:
    """Have the agent pass a signal on to its ranks, wait for them, and raise this exception again."""
    raise SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))


def _variables(cluster: ClusterConfig, env: Mapping[str, str], endpoint: "Endpoint | None") -> dict[str, str]:
    """Return the environment variables of the ranks that this process has not, or not so."""
    given = {**os.environ, **env}
    variables = {
        "OMP_NUM_THREADS": given.get("OMP_NUM_THREADS") or str(max(1, num_cores() // cluster.nproc_per_node)),
        **env,
        "PYTHONPATH": with_python_path(given)["PYTHONPATH"],  # the caller may have changed its working directory
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "none",  # the agent sets it, and would leave it
        LAUNCHER_PID: str(os.getpid()),
    }
    if cluster.nnodes > 1:  # nodes may count restarts differently: each start of the ranks gets a store of its own
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if endpoint is not None and endpoint.interface and "GLOO_SOCKET_IFNAME" not in given:
        variables["GLOO_SOCKET_IFNAME"] = endpoint.interface
    with suppress(OSError):
        variables[TERMINAL] = os.ttyname(2)
    return variables


def _cause(folder: RunFolder, error: ChildFailedError, stderr: Mapping[int, str], started: float) -> Failure:
    """Return the failure that made the run fail, and write it into the run folder."""
    logs = {rank: stderr.get(process.local_rank, "") for rank, process in error.failures.items()}
    failures = [failure_of_process(rank, process, logs[rank]) for rank, process in error.failures.items()]
    behind = furthest_behind(read_notes(folder))
    cause = cause_of(folder, failures, since=started, behind=(behind.rank, str(behind)) if behind else None)
    cause = replace(cause, log=logs.get(cause.rank, cause.log))  # of the rank that stood still, not who names it
    if not folder.is_locked():  # else by another launch, which goes on there
        write_failure(folder, cause)
    return cause


class _AgentLog(logging.FileHandler):
    """A log that leaves out what its disk does not take: an error of the log would hide the cause of a failure."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Print nothing."""


@contextmanager
def _agent_log(folder: RunFolder) -> Iterator[None]:
    """Write the agent's log to ``ranks/agent.log``: the user gets one line with the failure instead."""
    folder.ranks_path.mkdir(parents=True, exist_ok=True)
    handler = _AgentLog(folder.ranks_path / "agent.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.distributed.launcher")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.propagate = True
            logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()
