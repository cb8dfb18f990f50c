"""A command whose reader has ended, as ``head`` does, ends quietly."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
from rich.console import Console

from data import prepare
from experiments import sweep, train
from experiments.config.command_line import PIPE_CLOSED, run_command

COMMANDS: dict[str, Callable[[], object]] = {
    "list": lambda: run_command(lambda: print("\n".join(map(str, range(10_000)))) or 0),  # type: ignore[func-returns-value]
    "table": lambda: run_command(lambda: Console().print("a table") or 0),  # type: ignore[func-returns-value]
    "sweep": sweep.main,
    "train": train.main,
    "prepare": lambda: prepare.main(["--list"]),
}


@pytest.mark.parametrize(("name", "at_once"), [*((name, False) for name in COMMANDS), ("list", True), ("table", True)])
def test_what_nobody_reads_any_more_ends_without_an_error(name: str, at_once: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, suppress(BrokenPipeError), os.fdopen(writer, "w") as output:
        output.reconfigure(write_through=at_once)
        patch.setattr(sys, "stdout", output)
        patch.setattr(sys, "stderr", errors)
        patch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as end:
            sys.exit(COMMANDS[name]())  # type: ignore[arg-type]
    assert (end.value.code, errors.getvalue()) == (PIPE_CLOSED, "")


def test_a_list_that_does_not_fit_on_the_disk_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(OSError), open("/dev/full", "w") as full, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert prepare.main(["--list"]) == 1
    assert capsys.readouterr().err == "data.prepare: cannot write to standard output: No space left on device\n"
