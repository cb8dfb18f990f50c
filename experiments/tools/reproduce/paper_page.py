"""Write the page of a paper's reproduction: the results of each part, and their runs, code, data and machines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from experiments.config.errors import UserError
from experiments.reports.frames import load
from experiments.reports.html_page import below, escaped, fenced, write_html
from experiments.reports.markdown import table
from experiments.reports.measures import metric_of
from experiments.reports.names import label
from experiments.reports.pages import summary_text
from experiments.reports.provenance import origin_of
from experiments.runs.files import load_json, write_atomic
from experiments.tools.reproduce.papers import Paper, Part
from experiments.tools.reproduce.parts import seconds_of
from experiments.tools.reproduce.verdicts import answer

MACHINE = ("host", "platform", "cuda", "num_threads")  # keys of a manifest, shown as they are


def write_paper_page(paper: Paper, out: Path) -> Path:
    """Write page.md and index.html into the folder of a reproduction, from what stands there; return the latter's path.

    The same files give the same bytes.

    Raises:
        OSError: the page cannot be written.
    """
    note = f"{paper.source}. Reproduced at {paper.scale} scale; nothing here is the paper's own figure."
    blocks = [f"# {escaped(paper.name)}", escaped(note)]
    for part in paper.parts:
        if shown := _training(part) if part.trains else _drawn(part, out):
            blocks += [*_head(part, out), *shown]
    text = "\n\n".join(blocks) + "\n"
    write_atomic(out / "page.md", text)
    return write_html(text, f"{paper.name}, {paper.scale} scale", out / "index.html")


def _head(part: Part, out: Path) -> list[str]:
    claim = [escaped(f"The paper: {part.claim}.")] if part.claim else []
    seconds = seconds_of(part, out)
    took = [] if seconds is None else [f"Made in {seconds:.0f} s by:"]
    answers = [answer(question, part.folder) for question in part.verdicts]
    return [f"## {escaped(part.shows)}", *claim, *answers, *took, fenced(part.command)]


def _drawn(part: Part, out: Path) -> list[str]:
    """Return the figures and the reports of a part that does not train; nothing where it left none."""
    figures = [block for path in sorted(part.folder.rglob("*.png")) for block in _figure(path, out)]
    return [*figures, *(below(path.read_text(), 2) for path in sorted(part.folder.rglob("*.md")))]


def _figure(path: Path, out: Path) -> list[str]:
    """Return a figure, and a sentence that names the files beside it."""
    name, numbers, runs = path.relative_to(out), path.with_suffix(".csv"), path.with_name(f"{path.stem}.runs.txt")
    words = f"{path.stem}: the same for print is {name.with_suffix('.pdf')}"
    if numbers.exists():
        words += f", its {len(numbers.read_text().splitlines()) - 1} rows of numbers are in {numbers.name}"
    if runs.exists():
        words += f", and {len(runs.read_text().splitlines())} runs went into it"
    return [f"![{escaped(path.stem)}](<{quote(name.as_posix())}>)", f"*{escaped(words)}.*"]


def _training(part: Part) -> list[str]:
    """Return the table of a study's finished runs, and what they are from."""
    assert part.runs is not None
    try:
        frames = load(part.runs)
    except UserError as error:
        return [escaped(str(error))]
    last = frames.epochs.groupby("run").tail(1).set_index("run")
    lines = []
    for run in frames.runs.to_dict("records"):
        metric = metric_of([last.loc[run["run"], "metric"]])
        score = f"{metric.name} {metric.format(last.loc[run['run'], metric.key])}"
        lines.append([str(run["run"]), label(run["sparsifier"], run["variant"]), str(run["seed"]), score])
    manifests = [load_json(part.runs / run / "manifest.json") for run in frames.runs["run"]]
    return [
        below(summary_text(frames), 2),
        f"### Runs ({len(lines)})",
        _table(["run", "method", "seed", "measure"], lines),
        "### Configuration that they share",
        fenced(_shared(list(frames.settings.values())), "yaml"),
        "### Code, data and machines",
        _table(["what", "runs", "value"], _facts(manifests)),
    ]


def _table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return table(names, [[escaped(cell) for cell in line] for line in lines])


def _shared(configs: Sequence[Mapping[str, object]]) -> str:
    """Return the settings in which all configurations agree, by dotted keys."""
    first = configs[0]
    common = {key: first[key] for key in first if all(config.get(key, ...) == first[key] for config in configs)}
    return str(yaml.safe_dump(common, sort_keys=True, allow_unicode=True))


def _facts(manifests: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return each fact of the manifests once: its name, the number of runs that it is of, its value."""
    days = sorted(str(manifest.get("started")) for manifest in manifests)
    facts: Counter[tuple[str, str]] = Counter()
    for manifest in manifests:
        versions = ", ".join(f"{name} {version}" for name, version in (manifest.get("versions") or {}).items())
        data = [("data", f"{name} {digest}") for name, digest in (manifest.get("data_checksums") or {}).items()]
        machine = [(key, str(manifest[key])) for key in MACHINE if manifest.get(key)]
        facts.update(list(dict.fromkeys([*origin_of(manifest).items(), ("versions", versions), *machine, *data])))
    rows = [[name, str(count), value] for (name, value), count in sorted(facts.items())]
    return [["started", str(len(manifests)), f"{days[0]} to {days[-1]}"], *rows]
