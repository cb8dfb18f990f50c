"""A process knows whether it was started as a rank, and an error knows whether it is a consequence."""

import json
import os
from pathlib import Path

import pytest

from experiments.config.errors import UserError
from experiments.launching.failures import is_lost_peer
from experiments.launching.rank_environment import RankEnvironment, first_host, read_rank_environment
from experiments.launching.rank_process import recorded_errors

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
SRUN = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
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
        (without(SRUN, "SLURM_STEP_NUM_TASKS"), RankEnvironment(3, 4, 1, "node01", 21136)),
        ({**SRUN, "MASTER_ADDR": "10.0.0.1"}, RankEnvironment(3, 4, 1, "10.0.0.1", 21136)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),  # one task starts its own workers
        (without(SRUN, "SLURM_STEP_ID"), None),  # a batch script
        (without(SRUN, "SLURM_STEP_NODELIST"), None),
        ({**SRUN, "SLURM_STEP_ID": "4294967291"}, None),  # a batch script, as slurm numbers it
    ],
)
def test_read_rank_environment(environ: dict[str, str], place: RankEnvironment | None) -> None:
    assert read_rank_environment(environ) == place


def test_a_broken_environment_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^RANK and WORLD_SIZE are set but MASTER_ADDR is not; start with torchrun"):
        read_rank_environment(without(TORCHRUN, "MASTER_ADDR"))
    with pytest.raises(UserError, match=r"^environment variable RANK must be a whole number, got 'x'$"):
        read_rank_environment({**TORCHRUN, "RANK": "x"})


def test_an_exported_place_is_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.setenv(name, "")
    place = RankEnvironment(1, 2, 0, "head", 4321)
    place.export()
    assert read_rank_environment(os.environ) == place


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node[01-03,7],gpu1", "node01"),
        ("gpu1,node[01-03]", "gpu1"),
        ("gpu-a", "gpu-a"),
        ("rack[2,4]node[009-010]", "rack2node009"),
        ("n[5,7-9]-ib,x", "n5-ib"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def caused_by(cause: Exception) -> Exception:
    error = ValueError("bucket 3 was not reduced")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ValueError("backend must be nccl or gloo"), False),
        (RuntimeError("shapes differ"), False),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (ConnectionResetError("x"), True),
        (caused_by(RuntimeError("Gloo: send failed")), True),
        (caused_by(KeyError("x")), False),
    ],
)
def test_is_lost_peer(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) == lost


def test_an_error_is_recorded_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^one$"), recorded_errors(tmp_path, 3):
        raise ValueError("one")
    report = json.loads((tmp_path / "errors/rank3.json").read_text())
    assert (report["rank"], report["type"], report["message"], report["collective"]) == (3, "ValueError", "one", False)
    assert 'raise ValueError("one")' in report["traceback"]


def test_an_error_is_not_hidden_by_its_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^one$"), recorded_errors(tmp_path / "missing", 3):
        raise ValueError("one")


def test_an_exit_is_no_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), recorded_errors(tmp_path, 0):
        raise SystemExit(0)
    assert not list(tmp_path.iterdir())
