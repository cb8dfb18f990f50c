"""Write the pages that are read from the code: ``python docs/reference.py``, or ``--check`` to compare them only.

configuration.md    every group, choice and key, from the comments of conf/ and the dataclasses
api.md              the public names of micro, with the first sentence of each docstring
methods.md          its table of methods, from conf/sparsifier and two tables of results
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import micro
import micro.extend
import micro.testing
from docs.descriptions import Key, about, choices, default_choices, described, train_keys
from experiments.config import CONF
from experiments.config.conf_files import read_yaml
from experiments.config.schema import GROUPS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PUBLISHED = ROOT / "results/published"


def pages() -> dict[str, str]:
    """Return the text of each page that is written, by its name."""
    return {"configuration.md": configuration(), "api.md": api(), "columns.md": columns(), "methods.md": methods()}


# The configuration

_CONFIGURATION = """\
# Configuration

A run is described by *groups* (`model=resnet20`), each a file of `conf/GROUP/`, and *keys* (`density=0.001`,
`optimizer.momentum=0`). What you type overrides an experiment, which overrides `conf/train.yaml`.
`python -m experiments.train --cfg job` prints the whole configuration of a run.
"""


def configuration() -> str:
    """Return every group, choice and key in words, as Markdown."""
    parts = [_CONFIGURATION, "## Keys of a run", "", *_keys(train_keys())]
    for group in GROUPS:
        parts += ["", f"## `{group}`", "", *_group(group)]
    return "\n".join(parts) + "\n"


def _group(group: str) -> Iterator[str]:
    if words := about(group):
        yield from (words.replace("``", "`"), "")
    if default := default_choices().get(group):
        yield from (f"Without a choice: `{group}={default}`.", "")
    if keys := described(group):
        yield from _keys(keys, prefix=f"{group}.")
        yield ""
    rows = []
    for choice in choices(group).values():
        settings = [key for key in choice.keys if key.name.split(".")[0] not in ("cluster", "optimizer", "name")]
        rows.append((f"`{choice.name}`", _cell(choice.comment or "; ".join(map(_short, settings)))))
    yield from _table(("choice", "what it is"), rows)


def _keys(keys: Iterable[Key], prefix: str = "") -> Iterator[str]:
    rows = [(f"`{prefix}{key.name}`", f"`{_cell(key.value)}`", _cell(key.comment)) for key in keys]
    return _table(("key", "value by default", "meaning"), rows)


def _short(key: Key) -> str:
    return f"`{key.name}: {key.value}`" + (f" ({key.comment})" if key.comment else "")


# The columns of records

_COLUMNS = """\
# Columns of the records

`steps.jsonl` and `epochs.jsonl` of a [run folder](run_folders.md) have one JSON object per line. NaN and infinity are
`null`; a value that a method does not have is `null` too.
"""


def columns() -> str:
    """Return the meaning of every column, as Markdown."""
    parts = [_COLUMNS]
    for file, meanings in read_yaml(CONF / "columns.yaml").items():
        rows = [
            (", ".join(f"`{name}`" for name in names.split(", ")), _cell(words)) for names, words in meanings.items()
        ]
        parts += [f"## {file}.jsonl", "", *_table(("column", "meaning"), rows), ""]
    return "\n".join(parts).rstrip() + "\n"


# The public names

_API = """\
# API reference

All names of `import micro`, with the first sentence of their docstrings and the module that defines them. On the site,
arguments, shapes, errors and sources follow below each table; elsewhere `help(micro.Micro)` shows them.
"""
_SECTIONS = {  # headings, and the packages and modules of micro whose names stand below them
    "Attach and simulate": "ddp fsdp local drivers checkpoints simulate comm reducers.stats values.nonfinite",
    "Reducers": "reducers",
    "Selectors": "selectors",
    "Exchanges": "exchanges",
    "Codecs": "codecs",
    "Feedback and density": "feedback density",
    "Optimizers": "optim",
    "Parts by name": "",
}
_FRAMEWORKS = ("micro.integrations.lightning", "micro.integrations.transformers")


def api() -> str:
    """Return the index of names as Markdown."""
    parts, left = [_API], {name: getattr(micro, name) for name in micro.__all__ if name[0] != "_"}
    for heading, homes in _SECTIONS.items():
        own = [name for name, value in left.items() if _is_in(value.__module__, homes.split())]
        rows = [_row(f"micro.{name}", left.pop(name)) for name in sorted(own, key=str.swapcase)]
        parts += [f"## {heading}", "", *_table(("name", "what it is", "in"), rows), ""]
    extend = {name: getattr(micro.extend, name) for name in micro.extend.__all__ if not hasattr(micro, name)}
    rows = [(f"`{name}`", *_row(name, value)[1:]) for name, value in extend.items() if _first(value)]
    about_extend = "[Extending](extending.md) shows their use: `from micro.extend import Step`."
    parts += ["## For parts of your own", "", about_extend, "", *_table(("name", "what it is", "in"), rows), ""]
    files = [
        (f"`{name}`", _first_of_file(name)) for name in ("micro.extend", "micro.testing", "micro.patches", *_FRAMEWORKS)
    ]
    parts += ["## Modules", "", *_table(("name", "what it is for"), files), ""]
    planning = [(f"`{name}`", _first_of_file(name)) for name in sorted(_modules("experiments/planning"))]
    about_planning = "Schedules, costs and traces. What a method sends is predicted by `micro.predicted_traffic`."
    parts += ["## Planning", "", about_planning, "", *_table(("name", "what it is for"), planning)]
    return "\n".join(parts) + "\n"


def _is_in(module: str, homes: list[str]) -> bool:
    return not homes or any(f"{module}.".startswith(f"micro.{home}.") for home in homes)


def _row(name: str, value: Any) -> tuple[str, str, str]:
    home = getattr(value, "__module__", "")
    return f"`{name}`", _first(value), f"`{home.removeprefix('micro.')}`" if home.startswith("micro.") else ""


def _first(value: Any) -> str:
    """Return the first sentence of a docstring, empty for what has none of its own."""
    is_own = isinstance(value, ModuleType) or getattr(value, "__module__", "").startswith("micro")
    return _sentence(inspect.getdoc(value) or "") if is_own else ""


def _first_of_file(module: str) -> str:
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return _sentence(ast.get_docstring(ast.parse(source.read_text())) or "")


def _sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return _cell(re.split(r"(?<=[.:])\s(?=[A-Z`])", paragraph)[0].removesuffix(":"))


def _modules(folder: str) -> Iterator[str]:
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if not parts[-1].startswith("_"):
            yield ".".join(parts)


# The table of methods


def methods() -> str:
    """Return the page of methods with its first table written anew."""
    bytes_sent = _column("compare.md", "recorded", "sent", 100)
    accuracy = _column("methods.md", "ResNet-8 on CIFAR-10", "to dense", 1)
    rows = []
    for choice in sorted(choices("sparsifier").values(), key=lambda choice: _order(choice.name)):
        label = _head(choice.name, "label")
        words = re.sub(rf"^{re.escape(label)}: ", "", choice.comment).removesuffix(".")
        rows.append((f"`{choice.name}`", label, _cell(words), bytes_sent.get(label, ""), accuracy.get(label, "")))
    table = _table(("NAME", "in tables", "what a worker sends", "bytes, %", "accuracy"), rows, numbers=2)
    text = (DOCS / "methods.md").read_text()
    return re.sub(r"(?:^\|.*\n)+", lambda _: "\n".join(table) + "\n", text, count=1, flags=re.MULTILINE)


def _column(page: str, section: str, column: str, factor: int) -> dict[str, str]:
    """Return a column of the first table in a section of a published page, by method, at density 0.01 or 1."""
    text = re.split(rf"^## {section}", (PUBLISHED / page).read_text(), flags=re.MULTILINE)[1]
    header, _, *lines = re.findall(r"^\|(.+)\|$", text.split("\n## ")[0], re.MULTILINE)
    names = [name.strip() for name in header.split("|")]
    found = {}
    for line in lines:
        row = dict(zip(names, (cell.strip() for cell in line.split("|")), strict=True))
        if row.get("target", "1") in ("0.01", "1", "-"):
            found[row.get("method") or row["form"]] = f"{factor * float(row[column]):.3g}"
    return found


def _head(name: str, key: str) -> str:
    (value,) = re.findall(rf"^# {key}: (.+)$", (ROOT / f"conf/sparsifier/{name}.yaml").read_text(), re.MULTILINE)
    return str(value)


def _order(name: str) -> int:
    return int(_head(name, "order"))


# Markdown


def _table(header: Iterable[str], rows: Iterable[Iterable[str]], numbers: int = 0) -> Iterator[str]:
    """Yield the lines of a table; its last ``numbers`` columns are numbers."""
    names = list(header)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * (len(names) - numbers)}{'---:|' * numbers}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _cell(text: str) -> str:
    """Return text that can stand in a cell of a table."""
    return text.replace("|", "\\|").replace("``", "`")


def main(arguments: list[str]) -> int:
    """Write the pages, or name those that are not current and return 1."""
    stale = [name for name, text in pages().items() if (DOCS / name).read_text() != text]
    if arguments == ["--check"]:
        print(*(f"docs/{name} is not current: python docs/reference.py" for name in stale), sep="\n", end="")
        return int(bool(stale))
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
