"""Every command, setting, path, name and example on every page works: README, docs/ and published results."""

import argparse
import importlib
import pkgutil
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from difflib import ndiff
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.descriptions import train_keys
from experiments.config import CONF
from experiments.config.compose import compose_runs, expand, hydra_of_conf
from experiments.config.schema import GROUPS
from experiments.sweeps.study import jobs_of
from micro.retired import refusal_of_name

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests/dist/scripts"
PUBLISHED = ROOT / "results/published"
SOURCES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "results/published").glob("*.md")),
]
STAND_FOR = {  # words of the pages that a reader replaces
    "NAME": "demo",
    "SITE": "slurm_gpu_example",
    "RUN": "some-run",
    "RUN_FOLDER": "results/runs/some-run",
    "ENTITY/PROJECT": "me/micro",
    "PAPER": "micro",
    "SCALE": "small",
}
SCHEMATIC = {"python -m experiments.NAME", "make X"}  # which stand for many commands
GONE = re.compile(
    r"python -m experiments\.(advise|staleness|bench rules)\b"
)  # of published pages, which name their revision
ELSEWHERE = {"eval", "export", ".", "wandb", "pre-commit", "conda", "git", "cd"}  # commands that are not this project's
ARGUMENTS = {"written", "own", "buffers", "lane", "head"}  # of LocalSteps and attach; head: a variable of a job script
FOLDERS = {"micro", "experiments", "conf", "docs", "tests", "data", "models", "notebooks"}


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a page: their language and their text."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
        yield found[1], found[2]


def spans(path: Path) -> set[str]:
    """The pieces of code inside sentences and tables."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {" ".join(found[1].split()) for found in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose)}


def commands(path: Path) -> list[str]:
    """Every command of a page, one a line."""
    lines = [line for language, text in blocks(path) if language in ("", "bash") for line in joined(text)]
    return [*lines, *(span for span in sorted(spans(path)) if re.match(r"(python -m|make|micro-train) \S", span))]


def joined(text: str) -> list[str]:
    """Lines of a block without comments, continued ones in one piece."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line for line in (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines) if line]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


EVERY_PAGE = pytest.mark.parametrize("path", SOURCES, ids=name_of)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


class Parsed(Exception):
    """A command line was understood."""


@EVERY_PAGE
def test_commands_are_understood(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("parse_args", "parse_intermixed_args"):
        parse = getattr(argparse.ArgumentParser, method)

        def stopping(parser: argparse.ArgumentParser, *given: Any, parse: Any = parse) -> None:
            raise Parsed(parse(parser, *given))

        monkeypatch.setattr(argparse.ArgumentParser, method, stopping)
    wrong = []
    for command in commands(path):
        try:
            words = [replaced(word) for word in shlex.split(command)]
            is_gone = path.parent.name == "published" and GONE.match(command)
            if command not in SCHEMATIC and words[0] not in ELSEWHERE and not is_gone:
                check(words, monkeypatch)
        except (Exception, SystemExit) as error:
            wrong.append(f"{command}: {error}")
    assert not wrong, "\n".join(wrong)


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    match words:
        case ["make", *targets]:
            check_make(targets)
        case ["pip", *_]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            named = [extra for found in re.findall(r"\[(.+?)\]", " ".join(words)) for extra in found.split(",")]
            assert set(named) <= set(extras), f"there is no extra of {named}"
        case ["micro-train", *settings] | ["python", "-m", "experiments.train", *settings]:
            check_training(settings)
        case ["torchrun", *_] if "-m" in words:
            check(["python", *words[words.index("-m") :]], monkeypatch)
        case ["torchrun", *_]:
            check_script(words)
        case ["python", "-m", _, "--help"]:
            return
        case ["python", "-m", name, *options]:
            check_tool(name, options, monkeypatch)
        case _:
            raise AssertionError("a command that no test knows")


def check_script(words: list[str]) -> None:
    place = next(index for index, word in enumerate(words) if word.endswith(".py"))
    source = (ROOT / words[place]).read_text()
    for option in (word.partition("=")[0] for word in words[place + 1 :] if word.startswith("--")):
        assert f'"{option}"' in source, f"{words[place]} has no {option}"


def replaced(word: str) -> str:
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{STAND_FOR.get(value, value)}"


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_setting, value = word.partition("=")
        if is_setting:
            assert f"$({name})" in makefile, f"the Makefile knows no {name}"
            if name == "PAPER":
                assert set(value.split("|")) <= {path.stem for path in (CONF / "paper").glob("*.yaml")}
        else:
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"the Makefile has no target {name}"


def check_tool(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(Parsed) as parsed:
        importlib.import_module(name).main()
    (options,) = parsed.value.args
    if name == "experiments.sweep" and hasattr(options, "words") and options.name != "some-run":
        compose_runs(jobs_of(options.name, options.words)[:1])


def check_training(words: list[str]) -> None:
    flags = [word for word in words if word.startswith("-")]
    assert set(flags) <= {"-m", "--multirun", "--cfg", "--help"}
    others = re.compile(r"install=|\+*hydra[./]")  # of Hydra itself
    settings = [word for word in words if "=" in word and not others.match(word)]
    listed = [word for word in settings if "interval(" not in word]  # from which a sweeper of Hydra's chooses
    with hydra_of_conf():
        compose_runs(expand(listed))


@EVERY_PAGE
def test_settings_are_keys_of_the_configuration(path: Path) -> None:
    known = {*(key.name for key in train_keys()), *GROUPS, "hydra", "install"}
    named = {span.partition("=")[0] for span in spans(path) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*=\S+", span)}
    assert {name for name in named if name.split(".")[0] not in known} <= {"residual", "acc", "rule", *ARGUMENTS}


@EVERY_PAGE
def test_files_are_there(path: Path) -> None:
    named = {span for span in spans(path) if re.fullmatch(r"\.?[\w.-]+(/[\w.-]+)*/?", span) and "/" in span}
    named = {name for name in named if name.split("/")[0] in FOLDERS and not re.search("[A-Z]{3,}|cache", name)}
    assert {name for name in named if not (ROOT / name).exists()} <= HISTORY.get(path.name, set())


HISTORY = {"CHANGELOG.md": {"experiments/harness/"}}


@EVERY_PAGE
def test_names_of_the_library_are_there(path: Path) -> None:
    for span in spans(path):
        for name in re.findall(r"(?<![\w./])micro(?:\.\w+)+", span):
            went = path.name in HISTORY and refusal_of_name(name)
            if not went and not name.endswith((".md", ".json", ".yaml")):
                pkgutil.resolve_name(name)


@EVERY_PAGE
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    for language, text in blocks(path):
        if language == "python":
            sys.modules.setdefault("example", type(sys)("example"))
            exec(compile(text, name_of(path), "exec"), names)
        if language == "yaml":
            yaml.safe_load(text)


NUMBER = re.compile(r"(?<![\w.^/])(?<!\w-)\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)")


def measured(path: Path, text: str) -> set[float]:
    """Return the numbers of the published tables to which a piece of a page links; a published page has its own too."""
    linked = [(path.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]*?\.md)", text)]
    tables = [page.read_text() for page in linked if page.parent == PUBLISHED and page.exists()]
    if tables and path.parent == PUBLISHED:
        tables += [line for line in path.read_text().splitlines() if line.startswith("|") and line not in text]
    return {float(number.replace(",", "")) for table in tables for number in NUMBER.findall(table)}


@EVERY_PAGE
def test_a_number_beside_a_link_to_a_table_stands_in_that_table(path: Path) -> None:
    """In a row, a paragraph or an item of a list that links to results; as it stands there, or rounded."""
    unknown = []
    for piece in re.split(r"\n(?=[-|#])|\n\n", path.read_text()):
        values = measured(path, piece)
        prose = re.sub(r"\]\([^)]*\)|`[^`]*`", "", piece)
        for number in NUMBER.findall(prose) if values else ():
            value, decimals = float(number.replace(",", "")), len(number.partition(".")[2])
            is_precise = len(number.replace(".", "").lstrip("0")) > 1  # a single digit stands in every table
            near = any(
                abs(known - unit * value) <= 0.505 * unit * 10**-decimals
                for unit in (1, 100, 1000, 0.01, 0.001)
                for known in values
            )
            if is_precise and not near:
                unknown.append(f"{number} in: {piece[:80]}")
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize("page", ["README.md", "docs/library.md"])
def test_the_two_lines_are_those_of_the_tested_scripts(page: str) -> None:
    (shown,) = [text for language, text in blocks(ROOT / page) if language == "diff"]
    plain, sparse = ((SCRIPTS / name).read_text().splitlines() for name in ("plain_ddp.py", "sparse_ddp.py"))
    changes = [line[2:] for line in ndiff(plain, sparse) if line.startswith("+")]
    assert [line[1:] for line in shown.splitlines() if line.startswith("+")] == changes
    assert not [line for line in shown.splitlines() if line.startswith("-")]
    kept = [line[1:] for line in shown.splitlines() if line.startswith(" ")]
    assert set(kept) <= set(plain)
