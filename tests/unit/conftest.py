"""Unit tests start no process: they are what a developer runs on every save."""

import multiprocessing.process
import subprocess

import pytest


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts a process."""

    def refuse(*_arguments: object, **_settings: object) -> None:
        raise AssertionError("a test in tests/unit starts a process: it belongs in tests/tools or tests/dist")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
