"""What a build of the pages adds to them: the configuration, the list of public names, and files of the repository.

A comment in a page, on a line of its own, is replaced by what it names:

    <!-- configuration -->                every group, choice and key, from the comments of conf/ and the dataclasses
    <!-- api: selectors partition -->     the public names that these modules and packages of micro define
    <!-- api: rest -->                    the public names that no other page asks for
    <!-- modules: experiments.planning -->      every public module of a package, whole
    <!-- file: results/published/step.md -->  a file of the repository, its links turned to the pages
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

from experiments.config.descriptions import GROUPS, Key, about, choices, default_choices, described, train_keys

PAGES = Path(__file__).parent
_COMMENT = re.compile(r"^<!-- (configuration|api|modules|file)(?:: (.+?))? -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill a page before it is rendered; mkdocs calls this."""
    return filled(markdown)


def filled(markdown: str) -> str:
    """Return a page with what its comments name in their place."""
    text = _COMMENT.sub(lambda found: _filled(found[1], (found[2] or "").split()), markdown)
    return text.replace(" ± ", "\u00a0±\u00a0")  # a number and its spread stay on one line


def _filled(kind: str, words: list[str]) -> str:
    if kind == "configuration":
        return configuration()
    if kind == "file":
        return (PAGES.parent / words[0]).read_text().replace("](docs/", "](")
    if kind == "modules":
        return "\n".join(f"::: {module}\n" for package in words for module in _modules(package))
    return "\n".join(f"::: micro.{name}\n" for name in _names(words))


# The configuration


def configuration() -> str:
    """Return every group, choice and key in words, as Markdown."""
    parts = ["## Keys of a run", "", *_table(train_keys())]
    for group in GROUPS:
        parts += ["", f"## `{group}`", "", *_group(group)]
    return "\n".join(parts)


def _group(group: str) -> Iterator[str]:
    if says := about(group):
        yield says.replace("``", "`")
        yield ""
    default = default_choices().get(group)
    if default:
        yield f"Without a choice: `{group}={default}`."
        yield ""
    keys = described(group)
    if keys:
        yield from _table(keys, prefix=f"{group}.")
        yield ""
    yield "| choice | what it is |"
    yield "|---|---|"
    for choice in choices(group).values():
        settings = [key for key in choice.keys if key.name.split(".")[0] not in ("cluster", "optimizer")]
        says = choice.comment or "; ".join(_short(key) for key in settings if key.name != "name")
        yield f"| `{choice.name}` | {_cell(says)} |"


def _table(keys: list[Key] | tuple[Key, ...], prefix: str = "") -> Iterator[str]:
    yield "| key | value by default | meaning |"
    yield "|---|---|---|"
    for key in keys:
        yield f"| `{prefix}{key.name}` | `{_cell(key.value)}` | {_cell(key.comment)} |"


def _short(key: Key) -> str:
    return f"`{key.name}: {key.value}`" + (f" ({key.comment})" if key.comment else "")


def _cell(text: str) -> str:
    """Return text that can stand in a cell of a table."""
    return text.replace("|", "\\|").replace("``", "`").replace("${", "$\u200b{")


# The public names


@cache
def public_names() -> dict[str, str]:
    """Return the module or package of micro that defines each public name."""
    library = griffe.load("micro", search_paths=[str(PAGES.parent)])
    homes = {}
    for export in library.exports or []:
        name = str(export)
        path = library.members[name].target_path if library.members[name].is_alias else f"micro.{name}"
        homes[name] = path.split(".")[1]
    return homes


@cache
def homes_on_pages() -> set[str]:
    """Return the modules and packages whose names some page asks for."""
    texts = [path.read_text() for path in sorted(PAGES.rglob("*.md"))]
    asked = [found[2].split() for text in texts for found in _COMMENT.finditer(text) if found[1] == "api"]
    return {word for words in asked for word in words} - {"rest"}


def _names(words: list[str]) -> list[str]:
    homes = public_names()
    if words == ["rest"]:
        return sorted(name for name, home in homes.items() if home not in homes_on_pages() and name[0] != "_")
    named = [name for name, home in homes.items() if home in words]
    return sorted(named, key=lambda name: (words.index(homes[name]), name[0].isupper()))  # functions come first


def _modules(package: str) -> Iterator[str]:
    folder = PAGES.parent.joinpath(*package.split("."))
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(PAGES.parent).with_suffix("").parts
        if not parts[-1].startswith("_"):
            yield ".".join(parts)
