"""Call an entry point of experiments in this process, as a shell would, and see what it prints and starts."""

import contextlib
import importlib
import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch  # noqa: F401  # here: it starts a process when it is imported first
from hydra.core.global_hydra import GlobalHydra


class Started(BaseException):
    """A command started a process; no part of the code under test handles this."""


@dataclass(frozen=True, slots=True)
class Called:
    """How a command ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str


def call(words: Sequence[str]) -> Called:
    """Run ``python -m experiments.WORDS`` in this process.

    Raises:
        Started: the command started a process.
        Exception: whatever a process of its own would have shown as a traceback.
    """
    module = importlib.import_module(f"experiments.{words[0]}")
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, [str(module.__file__), *words[1:]]
    try:
        with _no_process(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = module.main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
        GlobalHydra.instance().clear()
    return Called(code=int(code or 0), out=out.getvalue(), err=err.getvalue())


@contextlib.contextmanager
def _no_process() -> Iterator[None]:
    def start(self: Any, *given: Any, **settings: Any) -> None:
        command = given[0] if given else settings["args"]
        self.returncode, self.args = 1, command  # for its __repr__ and __del__
        if command[0] in ("git", "uname"):  # asked for the revision of the code, and the machine: no worker
            raise FileNotFoundError(command[0])
        raise Started(str(command))

    start_of_python = subprocess.Popen.__init__
    subprocess.Popen.__init__ = start  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = start_of_python  # type: ignore[method-assign]
