"""The page of a paper's reproduction: verdicts, figures, commands, tables, and the origin of the numbers."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from experiments.config import CONF
from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError
from experiments.config.method_names import description
from experiments.reports.forms import in_words
from experiments.reports.frames import Frames, load
from experiments.reports.measures import metric_of
from experiments.reports.names import in_order, label
from experiments.reports.pages import summary_text
from experiments.reports.provenance import ORIGIN, origin_of
from experiments.reports.table import TRAINING
from experiments.runs.files import load_json, write_atomic
from experiments.tools.reproduce.html_page import below, escaped, fenced, write_html
from experiments.tools.reproduce.papers import SCALES, Paper, Part
from experiments.tools.reproduce.parts import seconds_of
from experiments.tools.reproduce.verdicts import verdicts
from experiments.tools.shared.markdown import table

MACHINE = ("host", "platform", "cuda", "num_threads")  # keys of a manifest, shown as they are
CAPTIONS = CONF / "captions.yaml"  # what figures show, by the beginnings of their names
SUMMARY = "summary.md"  # left out: the page shows the table of runs itself
HOW = """\
*Here* is what was measured or simulated at this scale. ± is the 95 % interval of the mean of differences between runs
with the same seed; *undecided*: the bound lies within it. Simulated values have no interval: all of them must hold."""
Settings = Mapping[str, object]


def write_paper_page(paper: Paper, out: Path) -> Path:
    """Write page.md and index.html from the files in a reproduction's folder; return the path of index.html.

    The same files give the same bytes.

    Raises:
        OSError: the page cannot be written.
    """
    scale = f"Reproduced at {paper.scale} scale: {SCALES[paper.scale]}"
    drawn = [part for part in paper.parts if not part.trains]
    reports = [report for part in drawn for report in _reports(part, out)]
    blocks = [
        f"# {escaped(paper.name)}",
        escaped(f"{paper.source}. {scale}. Only the column of claims has numbers from the paper."),
        *(["## Verdicts", _verdicts(paper, out), HOW] if paper.claims else []),
        *([f"What is known of the paper: {escaped(paper.known)}."] if paper.known else []),
        "## Figures",
        *(block for part in drawn for block in _figures(part, out)),
        "## How to repeat it",
        f"`python -m experiments.reproduce {paper.key} --scale {paper.scale}` carries out all of these:",
        fenced("\n".join(_command(part, out) for part in paper.parts)),
        *(["## Tables", *reports] if reports else []),
        "## Runs, machines, configurations",
        *(block for folder in dict.fromkeys(part.runs for part in paper.parts if part.runs) for block in _runs(folder)),
    ]
    text = "\n\n".join(blocks) + "\n"
    write_atomic(out / "page.md", text)
    return write_html(text, f"{paper.name}, {paper.scale} scale", out / "index.html")


def _verdicts(paper: Paper, out: Path) -> str:
    rows = []
    for claim in paper.claims:  # every claim once
        for place, verdict in enumerate(verdicts(claim, out)):
            rows.append(verdict if place == 0 else verdict._replace(claim="", source=""))
    return _table(["the paper claims", "source", "here", "verdict"], rows)


def _command(part: Part, out: Path) -> str:
    seconds = seconds_of(part, out)
    took = "not carried out yet" if seconds is None else f"{seconds:.0f} s"
    return f"{part.command}  # {part.name}: {took}"


def _figures(part: Part, out: Path) -> Iterator[str]:
    """Yield the figures of a part, or a sentence if there are none."""
    paths = sorted(part.folder.rglob("*.png"))
    yield f"### {escaped(part.shows)}"
    captions = {start: " ".join(text.split()) for start, text in read_yaml(CAPTIONS).items()}
    for path in paths:
        kind = max((start for start in captions if path.stem.startswith(start)), key=len, default="")
        yield from _figure(path, out, captions.pop(kind, ""))  # once for all figures of a kind
        captions.setdefault(kind, "")
    if not paths:
        files = [path.name for path in sorted(part.folder.rglob("*")) if path.is_file()]
        left = f"it left {', '.join(files)}" if files else "it was not carried out"
        yield f"No figure: {escaped(left)}."


def _figure(path: Path, out: Path, caption: str) -> list[str]:
    """Return the caption of a figure, the figure, and links to its other files."""
    name, numbers, runs = path.relative_to(out), path.with_suffix(".csv"), path.with_name(f"{path.stem}.runs.txt")
    beside = [f"for print [{path.stem}.pdf](<{quote(name.with_suffix('.pdf').as_posix())}>)"]
    if numbers.exists():
        rows = len(numbers.read_text().splitlines()) - 1
        beside.append(f"{rows} rows of [numbers](<{quote(name.with_suffix('.csv').as_posix())}>)")
    if runs.exists():
        beside.append(f"of {len(runs.read_text().splitlines())} runs")
    picture = f"![{escaped(path.stem)}](<{quote(name.as_posix())}>)"
    return [*([escaped(caption)] if caption else []), picture, f"*{', '.join(beside).capitalize()}.*"]


def _reports(part: Part, out: Path) -> list[str]:
    return [below(path.read_text(), 2) for path in sorted(part.folder.rglob("*.md")) if path.name != SUMMARY]


def _runs(folder: Path) -> list[str]:
    """Return the tables of a study's finished runs, their settings, and their origin."""
    try:
        frames = load(folder)
    except UserError as error:
        return [escaped(str(error))]
    last = frames.epochs.groupby("run").tail(1).set_index("run")
    lines = []
    for run in frames.runs.to_dict("records"):
        metric = metric_of([last.loc[run["run"], "metric"]])
        score = f"{metric.name} {metric.format(last.loc[run['run'], metric.key])}"
        lines.append([str(run["run"]), label(run["sparsifier"], run["variant"]), str(run["seed"]), score])
    manifests = [load_json(folder / run / "manifest.json") for run in frames.runs["run"]]
    shared = _common(list(frames.settings.values()))
    described = {name: description(name).get("words", "") for name in in_order(frames.runs["sparsifier"])}
    methods = [[label(name), words] for name, words in described.items() if words]
    return [
        "### Methods",
        _table(["method", "what a worker sends"], methods),
        below(summary_text(frames), 2),
        f"### Runs ({len(lines)})",
        _table(["run", "method", "seed", "measure"], lines),
        *_settings(frames, shared),
        "### Code, data and machines",
        _table(["what", "runs", "value"], _facts(manifests)),
    ]


def _settings(frames: Frames, shared: Settings) -> Iterator[str]:
    """Yield each training's own settings, and those that all share."""
    for _, own in frames.runs.groupby(TRAINING, sort=False):
        common = _common([frames.settings[run] for run in own["run"]])
        yield f"### Settings of {escaped(in_words(own))}"
        yield fenced(_yaml({key: value for key, value in common.items() if key not in shared}), "yaml")
    yield "### Settings of all runs"
    yield fenced(_yaml(shared), "yaml")


def _table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return table(names, [[escaped(cell) for cell in line] for line in lines], words=True)


def _common(configs: Sequence[Settings]) -> Settings:
    """Return the settings in which all configurations agree, by dotted keys."""
    first = configs[0]
    return {key: first[key] for key in first if all(config.get(key, ...) == first[key] for config in configs)}


def _yaml(settings: Settings) -> str:
    return str(yaml.safe_dump(dict(settings), sort_keys=True, allow_unicode=True))


def _facts(manifests: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return each fact of the manifests once: its name, its number of runs, its value."""
    days = sorted(str(manifest.get("started")) for manifest in manifests)
    facts: Counter[tuple[str, str]] = Counter()
    for manifest in manifests:
        versions = ", ".join(f"{name} {version}" for name, version in (manifest.get("versions") or {}).items())
        data = [("data", f"{name} {digest}") for name, digest in (manifest.get("data_checksums") or {}).items()]
        machine = [(key, str(manifest[key])) for key in MACHINE if manifest.get(key)]
        origin = [(ORIGIN[key], value) for key, value in origin_of(manifest).items()]
        facts.update(list(dict.fromkeys([*origin, ("versions", versions), *machine, *data])))
    rows = [[name, str(count), value] for (name, value), count in sorted(facts.items())]
    return [["started", str(len(manifests)), f"{days[0]} to {days[-1]}"], *rows]
