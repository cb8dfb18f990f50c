"""Studies on a real SLURM of two nodes: an array of two-node runs, a row that fails, a requeue, a resubmission."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from experiments.config import ROOT
from experiments.config.errors import UserError
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.sweeps.slurm_queue import in_queue, submit_array
from experiments.training.preflight import prepare_runs
from experiments.training.run import execute
from tests.refusals import refused
from tests.slurm.site import Site, running, unavailable
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(2400),
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
TINY = ["model=mlp", "dataset=synthetic"]
RUN = [*TINY, "dataset.settings.num_samples=2048", "batch_size=8", "sparsifier=exdyna", "density=0.05", "epochs=3"]
QUEUED = [
    *("cluster=slurm", "cluster.nnodes=2", "cluster.slurm.partition=test", "cluster.slurm.time_limit=00:50:00"),
]
NUM_STEPS = 3 * 128
WAIT_S = 900.0  # a quiet machine needs seconds; each of these processes imports torch


def ranks_of(job: str) -> list[int]:
    """Return the processes of a job on this machine that are ranks of a run."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "cmdline").read_text()
            if "training.run" in words and f"\0SLURM_JOB_ID={job}\0" in "\0" + (place / "environ").read_text():
                found.append(int(place.name))
    return found


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Return whether a signal waits for a process that stands still."""
    (pending,) = re.findall(r"(?m)^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(pending, 16) >> (number - 1) & 1)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running(num_nodes=2) as made:
        yield made


@dataclass(frozen=True)
class Study:
    """Runs of one output folder, submitted through SLURM."""

    jobs: list[list[str]]

    def submit(self, *, dry_run: bool = False) -> str:
        return submit_array("study", self.jobs, prepare_runs(self.jobs), dry_run=dry_run)

    @property
    def folders(self) -> list[RunFolder]:
        return [folder_of(config) for config in prepare_runs(self.jobs)]

    def logs(self) -> str:
        """The output of jobs and ranks, for the message of a failing test."""
        place = self.folders[0].path.parent
        return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in sorted(place.glob("**/*.log")))


def array_of(reply: str) -> str:
    return reply.split(" as array ")[1].split()[0]


@pytest.fixture(scope="module")
def study(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Runs of two nodes, gone through the queue: one stopped on its way, one that cannot end well."""
    output = tmp_path_factory.mktemp("study") / "100% runs"
    setup = f"export OMP_NUM_THREADS=1 PATH={Path(sys.executable).parent}:$PATH"
    common = [*RUN, *QUEUED, "cluster.slurm.throttle=2", f"output={output}", f"cluster.slurm.setup=['{setup}']"]
    study = Study([common, [*common, "lr=1e30"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SBATCH_EXPORT", "NONE")  # what setup and the script set reaches the ranks all the same
        reply = study.submit()
    try:
        go_through(site, study, reply)
    except BaseException:
        site.cancel()  # the other tests find an empty queue
        raise
    return study


def go_through(site: Site, study: Study, reply: str) -> None:
    assert reply.startswith("submitted 2 as array "), reply
    assert "(rows 1-2) of 2 runs: 0 done, 0 queued or running" in reply
    stop_and_release(site, f"{array_of(reply)}_1", study)
    wait_until(lambda: not site.queue(), "an empty queue", timeout_s=WAIT_S)
    states = [site.job(f"{array_of(reply)}_{row}")["JobState"] for row in (1, 2)]
    assert states == ["COMPLETED", "FAILED"], study.logs()


def stop_and_release(site: Site, task: str, study: Study) -> None:
    """Do to a run what its time limit would, and let it start again at once."""
    folder = study.folders[0]
    wait_until(lambda: site.job(task)["JobState"] == "RUNNING", "the start of a job", timeout_s=WAIT_S)
    job = site.job(task)["JobId"]  # not before it runs: until then it may be that of the whole array
    wait_until(lambda: len(ranks_of(job)) == 2, "two ranks", timeout_s=WAIT_S)
    ranks = ranks_of(job)
    wait_until(lambda: num_rows(folder), "a step", timeout_s=WAIT_S)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)  # so that the run does not end before the signal has come
    site.ask("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@S does before the time limit
    come = [partial(is_pending, rank, signal.SIGUSR1) for rank in ranks]  # their launchers pass it on
    wait_until(lambda: all(each() for each in come), "SIGUSR1 to the ranks", timeout_s=WAIT_S)
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    wait_until(lambda: site.job(job)["Restarts"] == "1" and not site.watchers(job), "a requeue", timeout_s=WAIT_S)
    assert site.job(job)["JobState"] == "PENDING", study.logs()
    assert 1 <= num_rows(folder) < NUM_STEPS
    assert folder.path.name in in_queue(folder.path.parent)
    assert "--array=1" not in study.submit(dry_run=True)  # the other row may have failed by now
    site.begin(job)


def num_rows(folder: RunFolder) -> int:
    return folder.steps_path.read_bytes().count(b"\n") if folder.steps_path.exists() else 0


def test_a_run_of_two_nodes_that_was_queued_again_ends_with_the_weights_of_an_undisturbed_one(
    study: Study, tmp_path: Path
) -> None:
    stopped, _ = study.folders
    assert [row["step"] for row in read_records(stopped.steps_path)] == list(range(NUM_STEPS))
    assert len(list(stopped.ranks_path.glob("note-*.json"))) == 2
    assert "resumed from step" in study.logs()
    assert stopped.attempts_path.exists()
    (config,) = prepare_runs([[*RUN, "cluster=simulated", "cluster.world_size=2", f"output={tmp_path / 'simulated'}"]])
    execute(config)
    one, other = (json.loads(each.done_path.read_text())["weights_sha256"] for each in (stopped, folder_of(config)))
    assert one == other


def test_the_failed_row_alone_is_submitted_again(site: Site, study: Study) -> None:
    failed = study.folders[1]
    output = failed.path.parent
    assert json.loads(failed.failure_path.read_text())["message"].startswith("NonFiniteGradient")
    assert "#SBATCH --array=2%2\n" in study.submit(dry_run=True)
    reply = study.submit()
    assert "(rows 2) of 2 runs: 1 done, 0 queued or running" in reply
    try:
        assert site.job(array_of(reply))["ArrayTaskId"].split("%")[0] == "2"
        ((run, task),) = in_queue(output).items()
        assert (run, task.partition(",")[0]) == (failed.path.name, f"SLURM {array_of(reply)}_2")
        assert study.submit() == "nothing to submit of 2 runs: 1 done, 1 queued or running"
    finally:
        site.cancel(array_of(reply))
    assert len(list(output.glob("slurm/*/array.sh"))) == 1


def test_what_sbatch_refuses_is_one_line(site: Site, tmp_path: Path) -> None:
    before = {line.split()[0] for line in site.queue()}
    for word, part in (("partition=gpu", "partition"), ("constraint=gpu", "eature")):
        words = [*TINY, "cluster=slurm", "cluster.nnodes=1", f"output={tmp_path}", "cluster.slurm.partition=test"]
        study = Study([[*words, f"cluster.slurm.{word}"]])
        refused(study.submit, "sbatch refused: ", part, error=UserError)
    assert {line.split()[0] for line in site.queue()} <= before


def test_hydras_own_launcher_sends_runs_through_the_queue(site: Site, tmp_path: Path) -> None:
    words = ["model=mlp", "dataset=synthetic", "dataset.settings.num_samples=256", "batch_size=8", "epochs=1"]
    words += ["cluster=simulated", "cluster.world_size=2", f"output={tmp_path}/runs", "lr=0.1,1e30"]
    asked = {"partition": "test", "timeout_min": 5, "mem_gb": 1, "cpus_per_task": 1}
    launcher = ["hydra/launcher=submitit_slurm", f"hydra.sweep.dir={tmp_path}/sweep"]
    launcher += [f"hydra.launcher.{key}={value}" for key, value in asked.items()]
    command = [sys.executable, "-m", "experiments.train", "-m", *launcher, *words]
    ran = subprocess.run(command, env=os.environ, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ran.returncode == 1, ran.stderr
    good, bad = (folder_of(config) for config in prepare_runs([[*words[:-1], "lr=0.1"], [*words[:-1], "lr=1e30"]]))
    assert good.is_done()
    assert not bad.is_done()
    (reply,) = [line for line in ran.stderr.splitlines() if line.startswith("error:")]
    assert reply.startswith(f"error: {bad.path.name}: ")
    assert "nonfinite=skip" in reply
    assert sorted(path.name for path in (tmp_path / "sweep/.submitit").iterdir() if path.is_dir())  # SLURM ran them
