"""Refusals: a user's mistake is one line that names the key and what was given, and a command then ends with code 2."""

import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import pytest

LONGEST = 3000  # characters of a line
NOTHING = ""  # is in every line: for rows of a table that have no value to look for


def refused(
    call: Callable[[], object] | str | Sequence[str],
    *parts: Any,
    error: type[BaseException] | tuple[type[BaseException], ...] = ValueError,
) -> str:
    """Check that a mistake is refused in one line that has all ``parts``; return the line.

    Args:
        call: what makes the mistake: a function without arguments, which must raise; or a command such as
            ``train epochs=0``, or its words, which must end with exit code 2 and start nothing.
        parts: the name of the setting, and the value in any way in which a line may show it: 1e+20 or 100000000000.
        error: the exceptions that a function may raise.
    """
    line = _line_of(call, error) if callable(call) else _line_of_command(call)
    assert "\n" not in line, line
    assert 0 < len(line) < LONGEST, line
    for part in parts:
        assert any(form in line for form in _forms(part)), f"{part!r} is not in: {line}"
    return line


def _line_of(call: Callable[[], object], error: Any) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def _line_of_command(command: str | Sequence[str]) -> str:
    from tests.in_process import call  # imports torch and Hydra

    called = call(shlex.split(command) if isinstance(command, str) else command)
    assert called.code == 2, called
    found = re.fullmatch(r"error: ([^\n]+)\n", called.err)
    assert found, called.err
    return found[1]


def _forms(given: Any) -> set[str]:
    forms = {str(given), repr(given)}
    if isinstance(given, bool) or given is None:
        forms.add({None: "null", True: "true", False: "false"}[given])
    elif isinstance(given, int | float):
        forms |= {f"{given:g}", f"{given:,}"} if abs(given) < 1e300 else set()
    return forms
