"""Two jobs of two nodes on one run folder: the second is refused, or takes over where the disk has no common locks."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.config.paths import ROOT
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import saved_step
from experiments.sweeps.job_script import Array, arrays_of, script
from experiments.training.preflight import prepare_runs
from tests.slurm.jobs import (
    MARKS,
    QUEUED,
    STEPS_PER_EPOCH,
    WAIT_S,
    WORDS,
    assert_as_undisturbed,
    send,
    two_ranks_of,
)
from tests.slurm.site import Site, running
from tests.waiting import wait_until

pytestmark = MARKS
RUN = [*WORDS, "epochs=4"]
NUM_STEPS = 4 * STEPS_PER_EPOCH


@pytest.fixture
def site() -> Iterator[Site]:
    with running(num_nodes=4) as made:
        yield made


def submitted(site: Site, array: Array, *options: str, path: str = "") -> str:
    """Submit the one run of an array; return the job."""
    (array.folder / "logs").mkdir(parents=True, exist_ok=True)
    (array.folder / "runs.txt").write_text(array.rows)
    # All nodes have the address of this machine, so the port must not be that of an earlier start.
    text = script(array, [1]).replace("% 10000))", "% 10000 + ${SLURM_RESTART_COUNT:-0}))")
    (array.folder / "array.sh").write_text(text)
    job = site.ask(
        "sbatch", "--parsable", f"--export=ALL,PYTHONPATH={path}{ROOT}", *options, str(array.folder / "array.sh")
    )
    job = job.strip()
    wait_until(lambda: site.job(f"{job}_1")["JobState"] != "PENDING", "the start of a job", timeout_s=WAIT_S)
    return site.job(f"{job}_1")["JobId"]


def one_run(tmp_path: Path) -> tuple[Array, RunFolder]:
    jobs = [[*RUN, *QUEUED, "cluster.timeout_s=900", "checkpoint.every_steps=10", f"output={tmp_path / 'runs'}"]]
    configs = prepare_runs(jobs)
    (array,) = arrays_of("study", jobs, configs)
    return array, folder_of(configs[0])


def test_a_second_job_is_refused_while_the_first_goes_on(site: Site, tmp_path: Path) -> None:
    array, folder = one_run(tmp_path)
    ranks: list[int] = []
    try:
        first = submitted(site, array)
        wait_until(lambda: saved_step(folder), "a checkpoint", timeout_s=WAIT_S)
        ranks = two_ranks_of(first)
        send(ranks, signal.SIGSTOP)  # so that the run does not end meanwhile; its launchers go on
        owner = folder.owner()
        assert owner is not None
        assert owner.job == f"SLURM job {first}"
        second = submitted(site, array, f"--exclude={site.job(first)['NodeList']}")
        wait_until(lambda: site.job(second)["JobState"] == "FAILED", "the end of the second job", timeout_s=WAIT_S)
        reported = [line for line in logs(array).splitlines() if line.startswith("error: ")]
        assert reported
        assert all(f"is in use by {owner}" in line for line in reported), reported
        assert folder.owner() == owner
        assert not folder.failure_path.exists()
        send(ranks, signal.SIGCONT)
        wait_until(lambda: site.job(first)["JobState"] == "COMPLETED", "the end of the run", timeout_s=WAIT_S)
    except (TimeoutError, AssertionError) as error:
        raise AssertionError(f"{error}\n{logs(array, folder)}") from error
    finally:
        send(ranks, signal.SIGKILL)
    assert_as_undisturbed(folder, RUN, tmp_path)


def test_a_job_whose_folder_another_took_over_stops_and_writes_nothing_more(site: Site, tmp_path: Path) -> None:
    """Where the locks of a disk hold for one machine only: the first owner finds another token before it commits."""
    array, folder = one_run(tmp_path)
    machines = f"{ROOT}/tests/slurm/machines:"
    try:
        first = submitted(site, array, path=machines)
        wait_until(lambda: saved_step(folder), "a checkpoint", timeout_s=WAIT_S)
        ranks = two_ranks_of(first)
        send(ranks, signal.SIGSTOP)  # as on nodes that SLURM has lost and whose processes go on later
        owner = folder.owner()
        assert owner is not None
        assert owner.job == f"SLURM job {first}"

        second = submitted(site, array, f"--exclude={site.job(first)['NodeList']}", path=machines)
        wait_until(lambda: site.job(second)["JobState"] == "COMPLETED", "the end of the run", timeout_s=WAIT_S)
        whole = {path: path.read_bytes() for path in (folder.done_path, folder.steps_path, folder.epochs_path)}

        send(ranks, signal.SIGCONT)
        wait_until(lambda: site.job(first)["JobState"] == "FAILED", "the end of the first job", timeout_s=WAIT_S)
        assert any(line.startswith("error: ") for line in logs(array).splitlines())
    except (TimeoutError, AssertionError) as error:
        raise AssertionError(f"{error}\n{logs(array, folder)}") from error
    assert {path: path.read_bytes() for path in whole} == whole
    assert [row["step"] for row in read_records(folder.steps_path)] == list(range(NUM_STEPS))
    assert "resumed from step" in logs(array)
    assert_as_undisturbed(folder, RUN, tmp_path)


def logs(array: Array, folder: RunFolder | None = None) -> str:
    """What the jobs said, and their ranks if the folder is given."""
    paths = [*sorted(array.folder.glob("logs/*")), *(sorted(folder.path.glob("**/*.log")) if folder else [])]
    return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in paths)
