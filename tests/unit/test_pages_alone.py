"""Pages as they stand in the repository, by a renderer that knows nothing of ours: text, links, written tables."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import micro

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINKING = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "results").rglob("*.md")]
PLAIN = MarkdownIt("commonmark").enable("table")
EVERY_PAGE = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())


def tokens(path: Path) -> list[Token]:
    """All tokens of a page, those inside of paragraphs too."""
    return [each for token in PLAIN.parse(path.read_text()) for each in (token, *(token.children or []))]


@EVERY_PAGE
def test_a_page_has_text_of_its_own_without_the_site(path: Path) -> None:
    text = " ".join(token.content for token in tokens(path) if token.type == "text")
    assert len(text.split()) >= 40
    assert ":::" not in text
    assert not [token.content for token in tokens(path) if token.type in ("html_block", "html_inline")]


def anchors(path: Path) -> set[str]:
    """The names by which GitHub leads to the headings of a page."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.MULTILINE)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in found]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_files_lead_to_files_and_headings(path: Path) -> None:
    wrong = []
    targets = [str(token.attrs.get("href") or token.attrs.get("src")) for token in tokens(path) if token.attrs]
    for target in targets:
        if re.match(r"https?://|mailto:|\.\./\.\./deployments", target) or target == "None":
            continue  # on the web, or a page of GitHub
        name, _, anchor = target.partition("#")
        goal = (path.parent / name) if name else path
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            wrong.append(target)
    assert not wrong


def module_of_docs(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["api.md", "columns.md", "configuration.md", "methods.md"])
def test_a_page_that_a_command_writes_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == module_of_docs("reference").pages()[name], "run: python docs/reference.py"


def test_every_public_name_has_one_row_and_its_docstring_on_the_site() -> None:
    pytest.importorskip("mkdocs")
    shown = re.findall(
        r"^::: micro\.(\w+)$", module_of_docs("hooks").with_docstrings((DOCS / "api.md").read_text()), re.M
    )
    names = [name for name in micro.__all__ if not name.startswith("_")]
    assert sorted(shown) == sorted([*names, "extend", "patches", "testing"])


def test_find_your_way_leads_to_files_and_folders_that_are_there() -> None:
    rows = re.findall(r"^\| [^|]+\? \| (.+) \|$", (DOCS / "find_your_way.md").read_text(), re.MULTILINE)
    assert len(rows) >= 40
    missing = [name for row in rows for name in re.findall(r"`([^`]+)`", row) if not (ROOT / name).exists()]
    assert not missing


GALLERY = [path for path in (DOCS / "gallery").glob("*.md") if "```py\n" in path.read_text()]


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.name)
def test_a_gallery_page_shows_lines_of_its_script(path: Path) -> None:
    for section in re.split(r"^## ", path.read_text(), flags=re.MULTILINE):
        scripts = [(path.parent / name).read_text() for name in re.findall(r"\]\((\w+\.py)\)", section)]
        known = {line.strip() for script in scripts for line in script.splitlines()} | {"", "..."}
        shown = re.findall(r"^```py\n(.*?)^```$", section, re.M | re.S)
        if scripts and shown:
            assert {line.strip() for line in shown[0].splitlines()} <= known
