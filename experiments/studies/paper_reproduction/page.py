"""The page of a paper's reproduction: what each part left, and the runs, code, data and machines that it is from."""

from collections import Counter
from collections.abc import Iterator, Sequence
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
from experiments.reports.output import write_file
from experiments.reports.pages import summary_text
from experiments.runs.atomic_files import load_json
from experiments.runs.run_folder import RunFolder
from experiments.studies.paper_reproduction.papers import Paper, Part
from experiments.studies.paper_reproduction.parts import seconds_of
from experiments.studies.paper_reproduction.verdicts import answer

MACHINE = ("host", "platform", "gpus", "cuda", "num_threads")  # keys of a manifest, shown as they are


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
    write_file(out / "page.md", text)
    return write_html(text, f"{paper.name}, {paper.scale} scale", out / "index.html")


def _head(part: Part, out: Path) -> list[str]:
    blocks = [f"## {escaped(part.shows)}"]
    if part.claim:
        blocks.append(escaped(f"The paper: {part.claim}."))
    blocks += [answer(question, part.folder) for question in part.verdicts]
    seconds = seconds_of(part, out)
    took = "" if seconds is None else f"Made in {seconds:.0f} s by:"
    return [*blocks, *([took] if took else []), fenced(part.command)]


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
    folders = [RunFolder(part.runs / run) for run in frames.runs["run"]]
    last = frames.epochs.groupby("run").tail(1).set_index("run")
    lines = []
    for run in frames.runs.to_dict("records"):
        row = last.loc[run["run"]]
        metric = metric_of([row["metric"]])
        score = f"{metric.name} {metric.format(row[metric.key])}"
        lines.append([str(run["run"]), label(run["sparsifier"], run["variant"]), str(run["seed"]), score])
    facts = [[name, str(count), value] for name, value, count in _facts(folders)]
    return [
        below(summary_text(frames), 2),
        f"### Runs ({len(lines)})",
        _table(["run", "method", "seed", "measure"], lines),
        "### Configuration that they share",
        fenced(_shared([yaml.safe_load(folder.config_path.read_text()) for folder in folders]), "yaml"),
        "### Code, data and machines",
        _table(["what", "runs", "value"], facts),
    ]


def _table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return table(names, [[escaped(cell) for cell in line] for line in lines])


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
    """Yield each fact of the manifests once, with the number of runs that it is of."""
    counts: Counter[tuple[str, str]] = Counter()
    for folder in folders:
        counts.update(dict.fromkeys(_facts_of(load_json(folder.manifest_path)), 1))
    days = sorted(value for name, value in counts if name == "started")
    if days:
        yield "started", f"{days[0]} to {days[-1]}", len(folders)
    for (name, value), count in sorted(counts.items()):
        if name != "started":
            yield name, value, count


def _facts_of(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
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
