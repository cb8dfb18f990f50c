"""Start the ranks of a run on this node, supervise them, and report in one line why they failed.

torch's elastic agent starts and supervises the processes. This module adds what the agent does not do: a signal stops
the caller's sweep as well as the run, no rank outlives this process, the agent prints nothing on the terminal, and the
reported rank is the one that caused the failure.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from experiments.config.endpoints import host_and_port
from experiments.config.errors import UserError
from experiments.launching.child_environment import num_cores, with_python_path
from experiments.launching.failures import (
    Failure,
    Kind,
    RankFailure,
    describe_exit,
    kind_of_exit,
    root_cause,
    short_line,
)
from experiments.launching.full_disks import LossyLog, blame_disk, spare_reports
from experiments.launching.meeting import check_endpoint
from experiments.launching.rank_process import LAUNCHER_PID, SPARE_REPORTS
from experiments.runs.atomic_files import RecordError, disk_errors, load_json, write_json
from experiments.runs.run_folder import RunFolder

_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
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
    env: Mapping[str, str] | None = None,
) -> None:
    """Run ``python -u -m module run_dir`` on every local rank and wait until all have finished.

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
        env: Environment variables of the workers, added to those of this process. If OMP_NUM_THREADS is in neither,
            each rank gets an equal share of the cores.

    Raises:
        RankFailure: A rank failed; ``failure.json`` in the run folder lists all failures.
        UserError: An argument is out of its range, or the nodes could not meet.
        KeyboardInterrupt: SIGINT was received; all ranks were stopped.
        SystemExit: Another signal was received, with code 128 + its number; all ranks were stopped. Neither is an
            Exception, so a sweep that catches Exception does not start the next run.
    """
    _check(nproc_per_node, nnodes, rdzv_endpoint)
    run_dir = run_dir.resolve()
    folder = RunFolder(run_dir)
    with disk_errors(folder.ranks_path):
        folder.ranks_path.mkdir(exist_ok=True)
        if nnodes == 1:
            _clear_reports(folder)
    config = LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=nproc_per_node,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=rdzv_endpoint,
        max_restarts=max_restarts,
        monitor_interval=0.1,
        logs_specs=_RankLogs(folder),
        local_addr="127.0.0.1" if nnodes == 1 else None,  # a laptop's own name often does not resolve
        signals_to_handle=",".join(number.name for number in _agent_signals()),
    )
    command = ("-u", "-m", "experiments.launching.rank_process", module, str(run_dir))
    with spare_reports() as spare, disk_errors(folder.path):
        variables = _worker_variables(nproc_per_node, env or {}) | ({SPARE_REPORTS: str(spare)} if spare else {})
        with _environment(variables), _agent_log(folder), _signals(folder), _failures(folder, spare, rdzv_endpoint):
            elastic_launch(config, sys.executable)(*command)


class _RankLogs(LogsSpecs):
    """One folder per rank, named by its global rank."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(log_dir=str(folder.ranks_path), redirects=Std.ALL)
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder.ranks_path)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        folders = {local_rank: _rank_folder(self._folder, int(env["RANK"])) for local_rank, env in envs.items()}
        for path in folders.values():
            path.mkdir(parents=True, exist_ok=True)
        return LogsDest(
            stdouts={local_rank: str(path / "stdout.log") for local_rank, path in folders.items()},
            stderrs={local_rank: str(path / "stderr.log") for local_rank, path in folders.items()},
            error_files={local_rank: str(path / "error.json") for local_rank, path in folders.items()},
        )


def _check(nproc_per_node: int, nnodes: int, rdzv_endpoint: str) -> None:
    for name, value in (("nproc_per_node", nproc_per_node), ("nnodes", nnodes)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    host, port = host_and_port(rdzv_endpoint, key="rdzv_endpoint", nnodes=nnodes)
    if port or nnodes > 1:
        check_endpoint(host, port, nnodes=nnodes, key="rdzv_endpoint")


def _rank_folder(folder: RunFolder, rank: int) -> Path:
    return folder.ranks_path / f"rank{rank}"


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
def _failures(folder: RunFolder, spare: Path | None, rdzv_endpoint: str) -> Iterator[None]:
    """Raise what ``launch`` promises in place of the agent's exceptions."""
    try:
        yield
    except SignalException as stop:
        # SignalException is an Exception: a sweep would count a failed run and start the next one.
        raise (KeyboardInterrupt() if stop.sigval == signal.SIGINT else SystemExit(128 + stop.sigval)) from None
    except RendezvousError as error:
        message = f"the nodes could not meet at {rdzv_endpoint}: {short_line(str(error))}; check host and port"
        raise UserError(message) from None
    except ChildFailedError as error:
        raise RankFailure(_record_failure(folder, spare, error.failures)) from None


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
    """Return the signals that the agent handles: without SIGINT if the caller has its own handler for it."""
    is_default = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN, None)
    return [number for number in _AGENT_SIGNALS if is_default or number != signal.SIGINT]


@contextmanager
def _signals(folder: RunFolder) -> Iterator[None]:
    """Forward SIGUSR1 to the ranks; at the end restore the handlers that the agent replaced."""
    if threading.current_thread() is not threading.main_thread():
        yield  # the agent sets no handlers either
        return
    before = {number: signal.getsignal(number) for number in (*_AGENT_SIGNALS, signal.SIGUSR1)}
    signal.signal(signal.SIGUSR1, lambda number, frame: _forward(folder, number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _forward(folder: RunFolder, number: int) -> None:
    """Send a signal to the ranks that this process started."""
    for path in folder.ranks_path.glob("rank*/pid"):
        with suppress(OSError, ValueError):  # not written yet, or gone
            pid = int(path.read_text())
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                os.kill(pid, number)


def _record_failure(folder: RunFolder, spare: Path | None, processes: Mapping[int, ProcessFailure]) -> Failure:
    """Find the cause of a failed launch, write ``failure.json``, and return the cause."""
    reports = _reports(folder, spare)
    failures = [_from_process(folder, rank, process) for rank, process in processes.items() if rank not in reports]
    for rank, report in reports.items():
        process = processes.get(rank)
        failures.append(_from_report(folder, report, exit_code=process.exitcode if process else None))
    failures += _reported_by_another_node(folder, known={failure.rank for failure in failures})
    failures = [blame_disk(failure, folder.path) for failure in failures]
    failures.sort(key=lambda failure: failure.rank)
    cause = root_cause(failures)
    with suppress(RecordError):  # the caller gets the cause, and a full disk may be that
        write_json(folder.failure_path, {**_to_row(cause), "failures": [_to_row(failure) for failure in failures]})
    return cause


def _reports(folder: RunFolder, spare: Path | None) -> dict[int, dict[str, Any]]:
    """Return what ``recorded_errors`` wrote, by rank; ranks of other nodes included."""
    places = [folder.errors_path, *([spare] if spare else [])]
    reports = [load_json(path) for place in places for path in sorted(place.glob("rank*.json"))]
    return {report["rank"]: report for report in reports if report}


def _reported_by_another_node(folder: RunFolder, known: set[int]) -> list[Failure]:
    """Return the failures that another node has already written to ``failure.json``, without the known ranks."""
    rows = load_json(folder.failure_path).get("failures", ())
    return [Failure(**{**row, "kind": Kind[row["kind"].upper()]}) for row in rows if row["rank"] not in known]


def _to_row(failure: Failure) -> dict[str, Any]:
    return {**asdict(failure), "kind": failure.kind.name.lower()}


def _from_report(folder: RunFolder, report: Mapping[str, Any], exit_code: int | None) -> Failure:
    return Failure(
        rank=report["rank"],
        kind=Kind.LOST_PEER if report["collective"] else Kind.ERROR,
        message=report["message"] if report.get("for_user") else short_line(f"{report['type']}: {report['message']}"),
        time=report["time"],
        exit_code=exit_code,
        log=str(_rank_folder(folder, report["rank"]) / "stderr.log"),
        traceback=report["traceback"],
        of_disk=bool(report.get("of_disk")),
    )


def _from_process(folder: RunFolder, rank: int, process: ProcessFailure) -> Failure:
    log = _rank_folder(folder, rank) / "stderr.log"
    return Failure(
        rank=rank,
        kind=kind_of_exit(process.exitcode),
        message=describe_exit(process.exitcode, log),
        time=process.timestamp,
        exit_code=process.exitcode,
        log=str(log),
    )
