"""One HTML page of a paper's reproduction: figures, tables, configuration, machines and commands, in a single file."""

import base64
import json
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from experiments.config.errors import UserError
from experiments.reports.frames import load
from experiments.reports.measures import metric_of
from experiments.reports.names import label
from experiments.reports.tables import markdown, summarise
from experiments.runs.atomic_files import load_json, write_atomic
from experiments.runs.run_folder import RunFolder
from experiments.studies.paper_studies import Paper, Part

DOTS_PER_PIXEL = 2  # of a figure's file to a pixel of the page
MACHINE = ("host", "platform", "gpus", "cuda", "num_threads")  # of a manifest, shown as they are


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
    """A part of the reproduction: what its command left.

    Attributes:
        seconds: that it took, None where it is not known.
        reports: tables and text.
        runs: finished ones, a line of cells each, the names of the columns first.
        settings: that all of its runs share, as yaml.
        facts: about machines and code, each with how many runs it is of.
        missing: why there is nothing to show.
    """

    part: Part
    seconds: float | None = None
    pictures: tuple[Picture, ...] = ()
    reports: tuple[Markup, ...] = ()
    runs: tuple[tuple[str, ...], ...] = ()
    settings: str = ""
    facts: tuple[tuple[str, str, int], ...] = ()
    missing: str = ""


def write_page(paper: Paper, out: Path) -> Path:
    """Write index.html into the folder of a reproduction, from what stands there; the same files give the same bytes.

    Raises:
        UserError: the page cannot be written.
    """
    sections = [_training(part, out) if part.trains else _drawn(part, out) for part in paper.parts]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    path = out / "index.html"
    write_atomic(path, environment.get_template("page.html").render(paper=paper, sections=sections) + "\n")
    return path


def _drawn(part: Part, out: Path) -> Section:
    pictures = tuple(_picture(path) for path in sorted(part.folder.rglob("*.png")))
    reports = tuple(_from_markdown(path.read_text()) for path in sorted(part.folder.rglob("*.md")))
    missing = "" if pictures or reports else "This part left nothing to show."
    return Section(part=part, seconds=_seconds(part, out), pictures=pictures, reports=reports, missing=missing)


def _training(part: Part, out: Path) -> Section:
    assert part.runs is not None
    try:
        frames = load(part.runs)
    except UserError as error:
        return Section(part=part, missing=str(error))
    folders = [RunFolder(part.runs / run) for run in frames.runs["run"]]
    last = frames.epochs.groupby("run").tail(1).set_index("run")
    lines = [("run", "method", "seed", "measure")]
    for run in frames.runs.to_dict("records"):
        row = last.loc[run["run"]]
        metric = metric_of([row["metric"]])
        score = f"{metric.name} {metric.format(row[metric.key])}"
        lines.append((str(run["run"]), label(run["sparsifier"], run["variant"]), str(run["seed"]), score))
    return Section(
        part=part,
        seconds=_seconds(part, out),
        reports=(_from_markdown(markdown(summarise(frames))),),
        runs=tuple(lines),
        settings=_shared([yaml.safe_load(folder.config_path.read_text()) for folder in folders]),
        facts=tuple(_facts(folders)),
    )


def _picture(path: Path) -> Picture:
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


def _from_markdown(text: str) -> Markup:
    """Return a report as HTML, what is HTML in it escaped, its headings below those of the page."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["image"])
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"
    return Markup(parser.renderer.render(tokens, parser.options, {}))  # the parser has escaped it


def _shared(configs: Sequence[Any]) -> str:
    return str(yaml.safe_dump(_common(configs), sort_keys=True, allow_unicode=True))


def _common(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings in which all configurations agree."""
    shared = {}
    for key in sorted(set.intersection(*(set(node) for node in nodes))):
        values = [node[key] for node in nodes]
        if all(isinstance(value, dict) for value in values):
            if inner := _common(values):
                shared[key] = inner
        elif all(value == values[0] for value in values):
            shared[key] = values[0]
    return shared


def _facts(folders: Sequence[RunFolder]) -> Iterator[tuple[str, str, int]]:
    """Yield what the manifests say, each value once, with the number of runs that say it."""
    said: Counter[tuple[str, str]] = Counter()
    for folder in folders:
        said.update(dict.fromkeys(_told(json.loads(folder.manifest_path.read_text())), 1))
    days = sorted(value for name, value in said if name == "started")
    if days:
        yield "started", f"{days[0]} to {days[-1]}", len(folders)
    for (name, value), count in sorted(said.items()):
        if name != "started":
            yield name, value, count


def _told(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    git, cpu = manifest.get("git") or {}, manifest.get("cpu") or {}
    yield "started", str(manifest.get("started"))
    yield "code", f"{git.get('revision') or 'unknown'}{' with changes' if git.get('dirty') else ''}"
    yield "processor", f"{cpu.get('num_cores')} cores of {cpu.get('model')}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in (manifest.get("versions") or {}).items())
    for key in MACHINE:
        if manifest.get(key):
            yield key, str(manifest[key])
    for name, checksum in (manifest.get("data_checksums") or {}).items():
        yield "data", f"{name} {checksum}"


def _seconds(part: Part, out: Path) -> float | None:
    try:
        return float(load_json(out / "parts" / f"{part.name}.json")["seconds"])
    except (ValueError, KeyError, TypeError):
        return None
