"""Convert a study's Markdown page to HTML, with one small template; figures are files in the same folder."""

import html
import re
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

from experiments.runs.files import write_atomic

TEMPLATE = Path(__file__).with_name("page.html")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def write_html(text: str, title: str, path: Path) -> Path:
    """Write Markdown as a page that loads the pictures beside it and nothing else; the same text gives the same bytes.

    Raises:
        OSError: it cannot be written.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    sections = _sections(tokens)
    for token in tokens:
        for child in token.children or []:
            if child.type == "image" and _is_elsewhere(str(child.attrs["src"])):
                child.type = "text"  # its content is the description of the picture
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    links = "".join(f'<li><a href="#{key}">{html.escape(name)}</a></li>\n' for key, name in sections.items())
    page = Template(TEMPLATE.read_text(encoding="utf-8"))
    return write_atomic(path, page.substitute(title=html.escape(title), links=links, body=body))


def escaped(text: str) -> str:
    """Return Markdown that shows a text as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def fenced(text: str, language: str = "") -> str:
    """Return Markdown of a block of code."""
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def below(text: str, levels: int) -> str:
    """Return Markdown whose headings, outside of blocks of code, are some levels lower."""
    lines, in_code = [], False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        is_heading = line.startswith("#") and not in_code
        lines.append(f"{'#' * levels}{line}" if is_heading else line)
    return "\n".join(lines)


def _sections(tokens: list[Token]) -> dict[str, str]:
    """Give each heading of the second level a key to link to; return their names by these keys."""
    found: dict[str, str] = {}
    for place, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            key = f"section-{len(found) + 1}"
            token.attrs["id"] = key
            found[key] = "".join(child.content for child in tokens[place + 1].children or [])
    return found


def _is_elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.scheme or parts.netloc or address.startswith("/"))
