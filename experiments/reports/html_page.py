"""One HTML page of figures, tables and text in a single file, which opens without a network."""

import base64
import struct
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from experiments.runs.atomic_files import write_atomic

DOTS_PER_PIXEL = 2  # of a figure's file to a pixel of the page


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure as the page holds it.

    Attributes:
        name: of its files, without their endings.
        uri: the picture itself.
        width, height: pixels that it takes.
        num_rows: of numbers drawn.
        runs: that they come from.
    """

    name: str
    uri: str
    width: int
    height: int
    num_rows: int | None
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What one command left.

    Attributes:
        key: of links to it, and the folder of its pictures.
        title: what it shows.
        text: a sentence above the figures; may be empty.
        command: as a user would type it.
        seconds: that it took, None where it is not known.
        reports: tables and text.
        runs: finished ones, a line of cells each, the names of the columns first.
        settings: that all of its runs share, as yaml.
        facts: name, value and number of runs of each fact about machines and code.
        missing: why there is nothing to show; empty where there is something.
    """

    key: str
    title: str
    command: str
    text: str = ""
    seconds: float | None = None
    pictures: tuple[Picture, ...] = ()
    reports: tuple[Markup, ...] = ()
    runs: tuple[tuple[str, ...], ...] = ()
    settings: str = ""
    facts: tuple[tuple[str, str, int], ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page: the title of its window, its heading, a note below it, and its sections."""

    title: str
    heading: str
    note: str
    sections: tuple[Section, ...]


def write_page(page: Page, path: Path) -> Path:
    """Write a page; the same content gives the same bytes. Raises: UserError when it cannot be written."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    write_atomic(path, environment.get_template("page.html").render(page=page) + "\n")
    return path


def picture(path: Path) -> Picture:
    """Return a PNG, with the number of rows in the .csv beside it and the runs in the .runs.txt."""
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])  # of a PNG's header
    numbers, runs = path.with_suffix(".csv"), path.with_name(f"{path.stem}.runs.txt")
    return Picture(
        name=path.stem,
        uri=f"data:image/png;base64,{base64.b64encode(data).decode()}",
        width=width // DOTS_PER_PIXEL,
        height=height // DOTS_PER_PIXEL,
        num_rows=len(numbers.read_text().splitlines()) - 1 if numbers.exists() else None,
        runs=tuple(runs.read_text().splitlines()) if runs.exists() else (),
    )


def from_markdown(text: str) -> Markup:
    """Return a report as HTML, HTML in it escaped, its headings two levels below those of the page."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["image"])
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"
    return Markup(parser.renderer.render(tokens, parser.options, {}))  # the parser has escaped it
