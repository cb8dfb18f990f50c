"""A process knows whether it was started as a rank, and an error knows whether it is a consequence."""

from pathlib import Path

import pytest

from experiments.launching.failures import Kind, is_lost_peer, read_failure, recorded_errors
from experiments.launching.rank_environment import (
    RankEnvironment,
    check_shape,
    read_rank_environment,
    shape_of,
)
from experiments.runs.run_folder import RunFolder
from tests.refusals import refused

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
SRUN = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-03,7],gpu1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        (TORCHRUN, RankEnvironment(5, 8, 1, "head", 1234)),
        ({**SRUN, **TORCHRUN}, RankEnvironment(5, 8, 1, "head", 1234)),  # torchrun inside srun
        (SRUN, RankEnvironment(3, 4, 1, "node01", 21136)),
        ({**SRUN, "MASTER_ADDR": "10.0.0.1"}, RankEnvironment(3, 4, 1, "10.0.0.1", 21136)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),  # one task starts its own workers
        ({**SRUN, "MICRO_LAUNCH": "node"}, None),  # so does each of a job script
        (without(SRUN, "SLURM_STEP_ID"), None),  # a batch script
        ({**SRUN, "SLURM_STEP_ID": "4294967291"}, None),  # a batch script, as slurm numbers it
    ],
)
def test_read_rank_environment(environ: dict[str, str], place: RankEnvironment | None) -> None:
    assert read_rank_environment(environ) == place


@pytest.mark.parametrize(
    ("environ", "shape"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, (2, 4)),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, (8, 1)),  # machines with different numbers
        (TORCHRUN, (8, 1)),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "2"}, (2, 2)),
    ],
)
def test_what_started_the_ranks_says_how_many_a_machine_has(environ: dict[str, str], shape: tuple[int, int]) -> None:
    ranks = read_rank_environment(environ)
    assert ranks
    assert shape_of(ranks, environ) == shape


def test_a_connection_error_means_that_another_rank_is_lost() -> None:
    caused = ValueError("bucket 3 was not reduced")
    caused.__cause__ = RuntimeError("Gloo: send failed")
    closed = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    assert all(map(is_lost_peer, (closed, ConnectionResetError("x"), caused)))
    assert not is_lost_peer(RuntimeError("shapes differ"))


@pytest.mark.parametrize("has_launcher", [True, False])
def test_an_error_is_recorded_and_raised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_launcher: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json") if has_launcher else "")
    folder = RunFolder(tmp_path)
    with pytest.raises(ConnectionResetError), recorded_errors(folder, 3):
        raise ConnectionResetError("another rank has caused it")
    assert read_failure(folder) is None
    with pytest.raises(ValueError, match=r"^one$"), recorded_errors(folder, 3):
        raise ValueError("one")
    found = read_failure(folder)
    assert found
    assert (found.rank, found.message, found.kind) == (3, "ValueError: one", Kind.ERROR)
    assert 'raise ValueError("one")' in (found.traceback or "")
    assert (tmp_path / "error.json").exists() == has_launcher
    folder.failure_path.unlink()
    folder.done_path.touch()
    with pytest.raises(ValueError, match="two"), recorded_errors(folder, 3):
        raise ValueError("two")
    assert read_failure(folder) is None, "a finished run is not changed"


@pytest.mark.parametrize(
    ("environ", "key", "given"),
    [
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR", "start with torchrun"),
        ({"LOCAL_RANK": "0"}, "RANK, WORLD_SIZE", "start with torchrun"),
        ({**TORCHRUN, "WORLD_SIZE": "2"}, "RANK must be a whole number from 0 to 1", 5),
        ({**SRUN, "SLURM_PROCID": "4"}, "RANK", 4),
        ({**SRUN, "SLURM_STEP_ID": "9" * 9999}, "SLURM_STEP_ID", "9" * 30),
    ],
)
def test_a_broken_environment_is_one_line(environ: dict[str, str], key: str, given: object) -> None:
    refused(lambda: read_rank_environment(environ), key, given)


def test_settings_that_contradict_the_ranks() -> None:
    ranks = RankEnvironment(5, 8, 1, "head", 1234)
    for words in ("cluster.nproc_per_node=4", "cluster.nnodes=2 cluster.nproc_per_node=4"):  # two nodes of four
        check_shape(words.split(), ranks, {})
    refused(lambda: check_shape(["cluster.nnodes=3"], ranks, {}), "cluster.nnodes=3", "started 8 ranks")
    here = {"LOCAL_WORLD_SIZE": "2"}
    refused(lambda: check_shape(["cluster.nproc_per_node=4"], ranks, here), "nproc_per_node=4", "started 8 ranks")
