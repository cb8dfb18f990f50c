"""The doctor: every check is a line, no key is ever shown, and the comparison agrees with the costs it comes from."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.planning.costs import Link
from experiments.tools.doctor.findings import Finding, carry_out
from experiments.tools.doctor.link import Measured, compare
from experiments.tools.doctor.machine import wandb

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef" * 2
MEASURED = Measured(10**6, Link(1e-3, 2e-9), select_s=0.01)


def test_it_tells_all_about_this_machine_in_one_document(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_API_KEY": KEY}
    command = [sys.executable, "-m", "experiments.doctor", "--json", "--nproc", "2", "--link-mbit", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["format"] == "micro-doctor-1"
    lines = {line["name"]: line for lines in found["sections"].values() for line in lines}
    assert {"python", "torch", "cores", "gpus", "gloo", "slurm", "results/", "data sets", "latency"} <= set(lines)
    assert not [line for line in lines.values() if line["state"] == "failed"]
    slow = lines["1 Mbit/s"]["data"]
    assert slow["numel"] == 11_173_962
    assert slow["dense_s"] > 8 * 4 * slow["numel"] / 1e6  # n = 2: a rank sends the whole vector once
    assert lines["1 Mbit/s"]["value"] == "can pay"
    assert lines["this machine"]["data"]["bits_per_s"] > 1e6
    slow = lines["step, 1 Mbit/s"]["data"]
    assert slow["first"] == min(slow["steps_s"], key=slow["steps_s"].get) != "dense"
    assert slow["steps_s"]["dense"] > 8 * 4 * 11_173_962 / 1e6
    assert KEY not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_fails_is_a_line_and_the_others_go_on() -> None:
    def driver() -> Iterator[Finding]:
        yield Finding("first", "kept")
        raise RuntimeError("no such\n  driver")

    found = list(carry_out({"driver": driver, "next": lambda: [Finding("next", "1")]}))
    assert [(line.name, line.state) for line in found] == [("first", "here"), ("driver", "failed"), ("next", "here")]
    assert found[1].note == "RuntimeError: no such driver"


@pytest.mark.parametrize("world_size", [2, 5, 16])
def test_both_take_the_same_time_at_the_break_even(world_size: int) -> None:
    rate = compare(Link(1e-4, 1e-9), MEASURED, world_size).break_even_bits_per_s
    slower, even, faster = (compare(Link(1e-4, each / rate), MEASURED, world_size) for each in (8.1, 8, 7.9))
    assert even.sparse_s == pytest.approx(even.dense_s)
    assert slower.sparse_s < slower.dense_s
    assert faster.sparse_s > faster.dense_s
    assert compare(Link(0.0, 1e-9), replace(MEASURED, select_s=0.0), world_size).break_even_bits_per_s == float("inf")


def test_of_a_key_only_that_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert [line.value for line in wandb()] == ["installed", "no"]
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert [line.value for line in wandb()] == ["installed", "yes"]
    assert KEY not in str(list(wandb()))
    monkeypatch.setenv("WANDB_BASE_URL", "http://my.server:8080")
    assert [line.value for line in wandb()] == ["installed", "no"]
