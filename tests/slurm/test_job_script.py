"""The job script as a user reads it, and what is refused before there is one. No SLURM is needed here."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import sweep
from experiments.config.checks import gpus_of_job
from experiments.config.compose import compose_run
from experiments.config.identity import run_name
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.sweeps.job_script import Array, arrays_of, script
from experiments.sweeps.slurm_queue import submit_array
from experiments.training.preflight import prepare_runs
from tests.finished_runs import write_study
from tests.refusals import refused

GOLDEN = Path(__file__).parent / "golden"
TINY = ["model=mlp", "dataset=synthetic", "dataset.settings.num_samples=4096"]


def arrays(*jobs: list[str]) -> list[Array]:
    given = [[*TINY, *job] for job in jobs]
    return arrays_of("study", given, prepare_runs(given))


def with_commands(folder: Path, **scripts: str) -> str:
    """Write commands that stand in for SLURM's; return a PATH that finds them first."""
    for name, content in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{content}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


RECORDED = {
    "two_nodes_of_gpus": ["cluster=slurm_gpu_example", "cluster.slurm.qos=high"],
    "one_node_once": ["cluster=slurm", "cluster.nnodes=1", "cluster.nproc_per_node=3", "cluster.slurm.requeue=false"],
    "simulated": ["cluster=simulated", "cluster.world_size=16"],
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_script_is_the_recorded_one(name: str) -> None:
    """Those of ``golden/``, which MICRO_RECORD=1 writes anew."""
    (array,) = arrays(*([*RECORDED[name], f"seed={seed}", "output=/disk/%j runs"] for seed in range(6)))
    array = replace(array, runs=tuple(f"run-{seed}" for seed in range(6)))  # whatever names are made of
    python = None if array.config.cluster.slurm.setup else "/venv/bin/python"
    made = script(array, [1, 3, 4, 5], python=python, working=Path("/home/me/micro"))
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("MICRO_RECORD"):
        path.write_text(made)
    assert made == path.read_text()
    assert subprocess.run(["bash", "-n"], input=made, text=True, check=False).returncode == 0


def test_runs_that_ask_for_other_nodes_are_other_arrays() -> None:
    two, one = ["cluster=slurm", "cluster.nnodes=2"], ["cluster=slurm", "cluster.nnodes=1"]
    first, second = arrays([*two, "seed=0"], [*one, "seed=0"], [*two, "seed=1"])
    assert [len(first.runs), len(second.runs)] == [2, 1]
    assert first.folder != second.folder


@pytest.mark.parametrize(("saves", "again"), [("step-000000007", True), ("", False)])
def test_a_run_that_its_time_limit_stops_is_queued_again_where_it_got_on(
    tmp_path: Path, saves: str, again: bool
) -> None:
    (array,) = arrays(["cluster=slurm", "cluster.nnodes=1", f"output={tmp_path}"])
    array.folder.mkdir(parents=True)
    (array.folder / "runs.txt").write_text(array.rows)
    checkpoints = tmp_path / array.runs[0] / "checkpoints"
    (checkpoints / "step-000000003").mkdir(parents=True)
    path = with_commands(
        tmp_path, srun=f"mkdir -p {checkpoints}/{saves}; exit 75", scontrol=f'echo "$*" > {tmp_path}/asked'
    )
    places = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "12", "PATH": path}
    ran = subprocess.run(
        ["bash", "-c", script(array, [1])], env={**os.environ, **places}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 75
    assert (tmp_path / "asked").exists() == again
    assert ("raise cluster.slurm.time_limit" in ran.stderr) == (not again)
    if again:
        assert (tmp_path / "asked").read_text() == "requeue 12\n"


def test_a_queued_run_is_called_queued_and_stays_where_clean_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*TINY, "cluster=slurm", "cluster.nnodes=1", f"output={tmp_path}/runs"]
    study = write_study(tmp_path, common, {"seed": [0, 1]})
    monkeypatch.setenv("PATH", with_commands(tmp_path, sbatch="echo 7", squeue="true"))
    jobs = [[*common, f"seed={seed}"] for seed in (0, 1)]
    configs = prepare_runs(jobs)
    submit_array("study", jobs, configs, dry_run=False)
    (array,) = tmp_path.glob("runs/slurm/*")
    for config in configs:  # both were stopped
        folder_of(config).path.mkdir()
        folder_of(config).config_path.touch()

    def sweep_says(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["sweep", *words])
        with pytest.raises(SystemExit, match="0"):
            sweep.main()
        return capsys.readouterr().out

    with_commands(tmp_path, squeue=f"echo '1 7 PENDING PartitionTimeLimit {array.name}'")
    first, second, last = sweep_says(study, "--list").splitlines()
    assert [first.split()[0], second.split()[0]] == ["queued", "stopped"]
    assert "SLURM 7_1, pending (PartitionTimeLimit)" in first
    assert last == "2 runs: 1 stopped, 1 queued"
    assert "1 stopped, 1 queued" in sweep_says("status", study)
    sweep_says("clean", study, "--yes")
    assert [folder_of(config).path.exists() for config in configs] == [True, False]
    with_commands(tmp_path, squeue="echo 'squeue: error: no controller' >&2; exit 1")
    assert "1 stopped, 1 not started" in sweep_says("status", study)


def test_a_study_submitted_from_a_job_takes_the_users_settings_along_and_not_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", with_commands(tmp_path, sbatch=f"env > {tmp_path}/environment; echo 7", squeue="true"))
    own = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "physics"}
    of_job = {
        "SLURM_JOB_ID": "7",
        "SLURM_CPU_BIND_LIST": "0x1",
        "SLURM_MEM_PER_NODE": "9",
        "SLURM_TRES_PER_TASK": "cpu=1",
    }
    words = [*TINY, "cluster=slurm", "cluster.nnodes=1", f"output={tmp_path}/runs"]
    for expected, given in ((own, own | of_job), (own | {"SLURM_HINT": "x"}, own | {"SLURM_HINT": "x"})):
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
            monkeypatch.delenv(name)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        submit_array("study", [words], prepare_runs([words]), dry_run=False)
        lines = (tmp_path / "environment").read_text().splitlines()
        assert dict(line.split("=", 1) for line in lines if line.startswith(("SLURM_", "SBATCH_"))) == expected


def test_a_dry_run_shows_all_and_without_sbatch_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    jobs = [[*TINY, "cluster=slurm", "cluster.nnodes=2", f"output={tmp_path}/runs", f"seed={seed}"] for seed in (0, 1)]
    made = submit_array("study", jobs, prepare_runs(jobs), dry_run=True)
    assert "#SBATCH --array=1-2\n" in made
    assert made.startswith("# trains on cpu, requests no GPUs")
    assert " ".join(jobs[1]) in made
    refused(lambda: submit_array("study", jobs, prepare_runs(jobs), dry_run=False), "--dry-run", "squeue")
    assert not (tmp_path / "runs").exists()


GPUS = {  # settings of SLURM, and the GPUs that they request on each of two nodes
    "slurm.gpus_per_node=3": 3,
    "slurm.extra=['--gres=gpu:1']": 1,
    "slurm.extra=['--gres=tmp:5G,gpu:a100:2(S:0-1)']": 2,
    "slurm.extra=['--gres gpu']": 1,
    "slurm.extra=['--gpus=a100:4,v100:4']": 4,
    "slurm.extra=['-G 2']": 1,
    "slurm.extra=['--gpus-per-task=4']": 4,
    "slurm.extra=['--tres-per-task=cpu:2,gres/gpu:3']": 3,
    "slurm.extra=['--constraint=gpu','--gres=tmp:5G']": 0,
    "slurm.partition=gpu": 0,
}


@pytest.mark.parametrize(("word", "number"), GPUS.items())
def test_gpus_are_counted_whichever_setting_of_sbatch_requests_them(word: str, number: int) -> None:
    (array,) = arrays(["cluster=slurm", "cluster.nnodes=2", f"cluster.{word}"])
    assert gpus_of_job(array.config.cluster) == number
    assert array.device.startswith(f"trains on {'cuda' if number else 'cpu'}, requests {number or 'no'} GPUs")


@pytest.mark.parametrize("option", ["--array=1-4", "-a 1"])
def test_a_study_makes_its_own_array(option: str) -> None:
    refused(lambda: compose_run([*TINY, f"cluster.slurm.extra=['{option}']"]), "cluster.slurm.throttle")


def test_an_owner_is_named_as_scancel_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"JOB_ID": "4", "ARRAY_JOB_ID": "1", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    folder = RunFolder(tmp_path)
    with folder.locked():
        assert "(SLURM job 1_3)" in str(folder.owner())


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cuda")])
@pytest.mark.parametrize("word", ["gpus_per_node={}", "extra=['--gres=gpu:{}']"])
def test_a_run_has_the_same_name_where_it_is_queued_and_in_its_job(
    word: str, gpus: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*TINY, "cluster=slurm", "cluster.nnodes=1", f"cluster.slurm.{word.format(gpus)}"]
    queued = compose_run(words)
    monkeypatch.setenv("MICRO_LAUNCH", "node")
    in_job = compose_run([*words, "cluster.rdzv_endpoint=localhost:0"])
    assert run_name(queued) == run_name(in_job) == run_name(compose_run([*words, f"cluster.device={device}"]))


@pytest.mark.parametrize(("word", "given"), [("device=cuda", 0), ("slurm.gpus_per_node=2", 2)])
def test_too_few_gpus_are_an_error_before_queueing(word: str, given: int) -> None:
    jobs = [[*TINY, "cluster=slurm", "cluster.nnodes=2", "cluster.nproc_per_node=4", f"cluster.{word}"]]
    refused(lambda: submit_array("study", jobs, prepare_runs(jobs), dry_run=True), "gpus_per_node", f"is {given} for 4")
