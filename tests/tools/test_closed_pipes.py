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
from experiments.config.paths import ROOT


def print_list() -> int:
    for number in range(10_000):
        print(number)
    return 0


def print_table() -> int:
    Console().print("a table")
    return 0


COMMANDS: dict[str, Callable[[], object]] = {
    "list": lambda: run_command(print_list),
    "table": lambda: run_command(print_table),
    "sweep": sweep.main,
    "train": train.main,
    "prepare": lambda: prepare.main(["--list"]),
}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", COMMANDS)
def test_what_nobody_reads_any_more_ends_without_an_error(
    name: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    errors = io.StringIO()
    with monkeypatch.context() as patch, suppress(BrokenPipeError), os.fdopen(writer, "w") as output:
        output.reconfigure(write_through=at_once)
        for stream, file in (("stdout", output), ("stderr", errors)):
            patch.setattr(sys, stream, file)
        patch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as end:
            sys.exit(COMMANDS[name]())  # type: ignore[arg-type]
    assert (end.value.code, errors.getvalue()) == (PIPE_CLOSED, "")


def test_every_command_runs_where_a_closed_pipe_is_met() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "experiments").glob("*.py")}
    commands = {name: source for name, source in sources.items() if "__main__" in source}
    assert len(commands) > 10
    assert [name for name, source in commands.items() if "run_command(" not in source] == []


def test_a_list_that_does_not_fit_on_the_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(OSError), open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert prepare.main(["--list"]) == 1
    assert capsys.readouterr().err == "data.prepare: cannot write to standard output: No space left on device\n"
