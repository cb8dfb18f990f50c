"""The page of a paper's reproduction: what each part left, and the runs, code, data and machines that it is from."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.config.errors import UserError
from experiments.reports.frames import load
from experiments.reports.html_page import Page, Section, from_markdown, picture, write_page
from experiments.reports.measures import metric_of
from experiments.reports.names import label
from experiments.reports.summary import summarise
from experiments.reports.tables import markdown
from experiments.runs.atomic_files import load_json
from experiments.runs.run_folder import RunFolder
from experiments.studies.paper_reproduction.papers import Paper, Part
from experiments.studies.paper_reproduction.parts import seconds_of

MACHINE = ("host", "platform", "gpus", "cuda", "num_threads")  # keys of a manifest, shown as they are


def write_paper_page(paper: Paper, out: Path) -> Path:
    """Write index.html into the folder of a reproduction, from what stands there; the same files give the same bytes.

    Raises:
        UserError: the page cannot be written.
    """
    page = Page(
        title=f"{paper.name}, {paper.scale} scale",
        heading=paper.name,
        note=f"{paper.source}. Reproduced at {paper.scale} scale; nothing here is the paper's own figure.",
        sections=tuple(_training(part, out) if part.trains else _drawn(part, out) for part in paper.parts),
    )
    return write_page(page, out / "index.html")


def _drawn(part: Part, out: Path) -> Section:
    pictures = tuple(picture(path) for path in sorted(part.folder.rglob("*.png")))
    reports = tuple(from_markdown(path.read_text()) for path in sorted(part.folder.rglob("*.md")))
    missing = "" if pictures or reports else "This part left nothing to show."
    return Section(**_head(part, out), pictures=pictures, reports=reports, missing=missing)


def _training(part: Part, out: Path) -> Section:
    assert part.runs is not None
    try:
        frames = load(part.runs)
    except UserError as error:
        return Section(**_head(part, out) | {"seconds": None}, missing=str(error))
    folders = [RunFolder(part.runs / run) for run in frames.runs["run"]]
    last = frames.epochs.groupby("run").tail(1).set_index("run")
    lines = [("run", "method", "seed", "measure")]
    for run in frames.runs.to_dict("records"):
        row = last.loc[run["run"]]
        metric = metric_of([row["metric"]])
        score = f"{metric.name} {metric.format(row[metric.key])}"
        lines.append((str(run["run"]), label(run["sparsifier"], run["variant"]), str(run["seed"]), score))
    return Section(
        **_head(part, out),
        reports=(from_markdown(markdown(summarise(frames))),),
        runs=tuple(lines),
        settings=_shared([yaml.safe_load(folder.config_path.read_text()) for folder in folders]),
        facts=tuple(_facts(folders)),
    )


def _head(part: Part, out: Path) -> dict[str, Any]:
    claim = f"The paper: {part.claim}" if part.claim else ""
    return {
        "key": part.name,
        "title": part.shows,
        "text": claim,
        "command": part.command,
        "seconds": seconds_of(part, out),
    }


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
