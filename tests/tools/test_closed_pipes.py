"""A command whose reader has ended, as ``head`` does, ends quietly."""

import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from rich.console import Console

from data import prepare
from experiments.config.command_line import PIPE_CLOSED, run_command
from experiments.config.paths import ROOT

TOOLS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "experiments").glob("*.py")}


@contextmanager
def closed_pipe(monkeypatch: pytest.MonkeyPatch, *, at_once: bool) -> Iterator[io.StringIO]:
    """Make standard output a pipe that nobody reads, written ``at_once`` or through a buffer; yield standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    output, errors = os.fdopen(writer, "w"), io.StringIO()
    output.reconfigure(write_through=at_once)
    with monkeypatch.context() as patch, suppress(BrokenPipeError), output:
        patch.setattr(sys, "stdout", output)
        patch.setattr(sys, "stderr", errors)
        yield errors


def print_list() -> int:
    for number in range(10_000):
        print(number)
    return 0


def print_table() -> int:
    Console().print("a table")
    return 0


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("work", [print_list, print_table])
def test_a_list_that_nobody_reads_any_more_ends_without_an_error(
    work: Callable[[], int], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_pipe(monkeypatch, at_once=at_once) as errors:
        assert run_command(work) == PIPE_CLOSED
    assert errors.getvalue() == ""


def test_every_command_runs_where_a_closed_pipe_is_met() -> None:
    commands = {tool: source for tool, source in TOOLS.items() if "__main__" in source}
    assert len(commands) > 10
    assert [tool for tool, source in commands.items() if "run_command(" not in source] == []


@pytest.mark.parametrize("tool", ["sweep", "train"])
def test_help_that_nobody_reads_ends_without_an_error(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main = importlib.import_module(f"experiments.{tool}").main
    monkeypatch.setattr(sys, "argv", [tool, "--help"])
    with closed_pipe(monkeypatch, at_once=True) as errors, pytest.raises(SystemExit) as end:
        sys.exit(main())
    assert end.value.code == PIPE_CLOSED
    assert errors.getvalue() == ""


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("word", ["--list", "--help"])
def test_a_list_of_data_sets_that_nobody_reads_ends_without_an_error(
    word: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_pipe(monkeypatch, at_once=at_once) as errors:
        assert prepare.main([word]) == PIPE_CLOSED
    assert errors.getvalue() == ""


def test_a_list_of_data_sets_that_does_not_fit_on_the_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(OSError), open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert prepare.main(["--list"]) == 1
    assert capsys.readouterr().err == "data.prepare: cannot write to standard output: No space left on device\n"


def test_a_pipe_that_broke_elsewhere_is_an_error() -> None:
    def fail() -> int:
        raise BrokenPipeError("of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        run_command(fail)
