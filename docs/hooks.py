"""What a build of the site adds: pages that stand outside of docs/, links to them, and the docstrings of the API.

Every page of docs/ reads as it stands, on GitHub too. mkdocs calls these functions by their names.
"""

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

import micro.extend

ROOT = Path(__file__).parents[1]
OUTSIDE = ("results/published/*.md", "CONTRIBUTING.md", "CHANGELOG.md")
API = "api.md"
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
_ROW = re.compile(r"^\| `((?:micro|experiments)\.[\w.]+)` \|", re.MULTILINE)  # a full name in the index


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository that are not in docs/."""
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put docstrings behind the tables of the API, and turn links so that they lead to pages of the site."""
    name = page.file.src_uri
    text = with_docstrings(markdown) if name == API else markdown
    text = _LINK.sub(lambda link: _turned(link, name, files, config.repo_url or ""), text)
    return text.replace(" ± ", "\u00a0±\u00a0")  # a number and its spread stay on one line


def with_docstrings(markdown: str) -> str:
    """Return the index of names with the docstrings of each section's names at the section's end."""
    sections = re.split(r"(?=^## )", markdown, flags=re.MULTILINE)
    return "\n".join(each + "".join(map(_docstring, _ROW.findall(each))) for each in sections)


def _docstring(name: str) -> str:
    """Return the directive for a name's docstrings; those that micro.extend repeats from micro are left out."""
    repeated = "|".join(set(micro.extend.__all__) & set(micro.__all__)) if name == "micro.extend" else "_.*"
    return f'\n::: {name}\n    options:\n      filters: ["!^_", "!^({repeated})$"]\n'


def _turned(link: re.Match[str], page: str, files: Files, repository: str) -> str:
    """Return a link between files as one between pages; a file without a page is linked in the repository, if known."""
    words, target, anchor = link[1], link[2], link[3] or ""
    source = PurePosixPath(page) if (ROOT / page).is_file() else "docs" / PurePosixPath(page)
    path = posixpath.normpath(posixpath.join(source.parent, target))
    goal = path.removeprefix("docs/")
    if files.get_file_from_path(goal):
        return f"[{words}]({posixpath.relpath(goal, posixpath.dirname(page) or '.')}{anchor})"
    if not (ROOT / path).exists():
        return link[0]  # mkdocs reports it
    return f"[{words}]({repository}/blob/main/{path})" if repository else words
