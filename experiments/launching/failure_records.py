"""Find why a launch failed, from exit codes and from what ranks and watchers reported, and write ``failure.json``."""

import re
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from experiments.launching.failures import (
    ENDED_WITH_RUN,
    Failure,
    Kind,
    describe_exit,
    kind_of_exit,
    root_cause,
    short_line,
    with_consequences,
)
from experiments.launching.full_disks import blame_disk
from experiments.launching.watching.beats import rank_folder
from experiments.launching.watching.launch_watch import LaunchWatch
from experiments.launching.watching.stall_report import StallReport
from experiments.runs.atomic_files import RecordError, load_json, write_json
from experiments.runs.run_folder import RunFolder

_TIMED_OUT = re.compile(r"timed?[- ]?out", re.I)


def record_failure(
    folder: RunFolder,
    processes: Mapping[int, ProcessFailure],
    watch: LaunchWatch,
    *,
    spare: Path | None = None,
) -> Failure:
    """Find the cause of a failed launch, write ``failure.json``, and return the cause.

    Args:
        processes: The ranks of this node that ended with an exit code other than 0.
        watch: What watched over the ranks; it knows whom it ended, and why.
        spare: A folder of reports that the run folder could not take.
    """
    failures = with_consequences(_failures(folder, spare, processes, watch.killed))
    failures = [blame_disk(failure, folder.path) for failure in failures]
    if found := watch.found():
        others = [one for one in failures if one.rank != found.rank]
        failures = with_consequences([_from_finding(folder, found), *others])
    failures.sort(key=lambda failure: failure.rank)
    if not failures:
        failures = [_lost_store(folder)]
    cause = root_cause(failures)
    missed = watch.missed()  # a time-out of a collective does not name who did not come
    if missed and cause.kind == Kind.LOST_PEER and cause.rank != missed.rank and _TIMED_OUT.search(cause.message):
        words = short_line(f"{missed.message()}; rank {cause.rank} waited for it: {cause.message}")
        cause = Failure(missed.rank, Kind.STALLED, words, cause.time, None, _log(folder, missed.rank))
        failures = [cause, *(one for one in failures if one.rank != cause.rank)]
    if folder.is_locked():  # by a process of another launch, which goes on there
        return cause
    with suppress(RecordError):  # the caller gets the cause, and a full disk may be that
        write_json(folder.failure_path, {**_to_row(cause), "failures": [_to_row(failure) for failure in failures]})
    return cause


def _failures(
    folder: RunFolder, spare: Path | None, processes: Mapping[int, ProcessFailure], killed: Container[int]
) -> list[Failure]:
    reports = _reports(folder, spare)
    failures = [_from_process(folder, rank, one, killed) for rank, one in processes.items() if rank not in reports]
    for rank, report in reports.items():
        process = processes.get(rank)
        failures.append(_from_report(folder, report, exit_code=process.exitcode if process else None))
    return failures + _reported_by_another_node(folder, known={failure.rank for failure in failures})


def _reports(folder: RunFolder, spare: Path | None) -> dict[int, dict[str, Any]]:
    """Return what ``recorded_errors`` wrote, by rank; ranks of other nodes included."""
    places = [folder.errors_path, *([spare] if spare else [])]
    reports = [load_json(path) for place in places for path in sorted(place.glob("rank*.json"))]
    return {report["rank"]: report for report in reports if isinstance(report.get("rank"), int)}


def _reported_by_another_node(folder: RunFolder, known: set[int]) -> list[Failure]:
    """Return the failures that another node has already written to ``failure.json``, without the known ranks."""
    rows = load_json(folder.failure_path).get("failures", ())
    return [Failure(**{**row, "kind": Kind[row["kind"].upper()]}) for row in rows if row["rank"] not in known]


def _to_row(failure: Failure) -> dict[str, Any]:
    return {**asdict(failure), "kind": failure.kind.name.lower()}


def _from_finding(folder: RunFolder, found: StallReport) -> Failure:
    return Failure(
        rank=found.rank,
        kind=Kind.LOST_HOST if found.is_host else Kind.STALLED,
        message=short_line(found.message),
        time=found.time,
        exit_code=None,
        log=_log(folder, found.rank),
    )


def _from_report(folder: RunFolder, report: Mapping[str, Any], exit_code: int | None) -> Failure:
    return Failure(
        rank=report["rank"],
        kind=Kind.LOST_PEER if report["collective"] else Kind.ERROR,
        message=report["message"] if report.get("for_user") else short_line(f"{report['type']}: {report['message']}"),
        time=report["time"],
        exit_code=exit_code,
        log=_log(folder, report["rank"]),
        traceback=report["traceback"],
        of_disk=bool(report.get("of_disk")),
    )


def _from_process(folder: RunFolder, rank: int, process: ProcessFailure, killed: Container[int]) -> Failure:
    log = _log(folder, rank)
    by_launcher = process.pid in killed
    return Failure(
        rank=rank,
        kind=Kind.STOPPED if by_launcher else kind_of_exit(process.exitcode, Path(log)),
        message=ENDED_WITH_RUN if by_launcher else describe_exit(process.exitcode, Path(log)),
        time=process.timestamp,
        exit_code=process.exitcode,
        log=log,
    )


def _lost_store(folder: RunFolder) -> Failure:
    """Return the failure of a node whose ranks had not failed: another node has, and has not told why."""
    return Failure(
        rank=0,
        kind=Kind.LOST_HOST,
        message="lost the node at which the others meet, cluster.rdzv_endpoint: its own output says why",
        time=time.time(),
        exit_code=None,
        log=str(folder.ranks_path / "launcher.log"),
    )


def _log(folder: RunFolder, rank: int) -> str:
    return str(rank_folder(folder.path, rank) / "stderr.log")
