"""Every paper's file can be carried out, and what it leaves is one page that needs nothing else."""

import importlib
import itertools
import json
import os
import re
import shlex
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from experiments import figures, reproduce
from experiments.config import CONF
from experiments.config.compose import compose_runs
from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError
from experiments.reports.pages import load_page
from experiments.sweeps import study
from experiments.tools.reproduce import papers, parts
from experiments.tools.reproduce.paper_page import write_paper_page
from experiments.tools.reproduce.papers import Paper, Part, load_paper
from experiments.tools.reproduce.verdicts import FAILS, HOLDS, UNDECIDED, Claim, verdicts
from experiments.training.run import execute
from tests.refusals import refused

TINY = """\
name: Tiny <b>
source: nobody, nowhere
parts:
  training:
    shows: Two runs
    small: sweep tiny output={runs}
  curves:
    shows: Figures of two runs
    small: figures --runs {runs} --out {here} --only density,residual
"""
TINY_STUDY = """\
overrides: [model=mlp, cluster=simulated, cluster.world_size=2, batch_size=200, epochs=1, measure_residual_every=1]
grid:
  sparsifier: [dense, topk]
"""
LITTLE = ["model=mlp", "batch_size=4"]
SMALL = {  # what makes a part short: of an option that stands twice, the second counts
    "sweep": ["epochs=1"],
    "figures": [],
    "compare": [*LITTLE, "--methods", "dense,topk", "--steps", "2", "--world-sizes", "2", "--select-numel", "none"],
    "theory": ["--steps", "0,1", "--numel", "2000", "--repeats", "1"],
    "simulate": ["--methods", "dense,topk", "--workers", "1,4", "--schedules", "exact"],
    "profile": [],
}


def loads(page: str) -> list[str]:
    """Return what a browser would fetch."""
    return re.findall(r"<(?:script|iframe|link|object|embed)|(?<=src=\")[^\"]+", page)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "paper"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    monkeypatch.setattr(papers, "FOLDER", folder)
    return folder / "tiny.yaml"


def part_of(folder: Path, *words: str, name: str = "some") -> Part:
    return Part(name=name, shows="<i>shown</i>", words=words, folder=folder / name)


def paper_of(*parts: Part) -> Paper:
    claim = Claim(says="best <b>of all</b>", source="a", numbers="a.csv", rows="a", value="a", here="a", at_least=0)
    return Paper(key="k", name="Name & co", source="<source>", scale="small", parts=parts, claims=(claim,))


@pytest.mark.parametrize(
    ("name", "scale"), [*itertools.product(papers.known_papers(), ("paper", "small")), ("micro", "medium")]
)
def test_every_command_of_every_paper_is_understood(name: str, scale: str, tmp_path: Path) -> None:
    paper = load_paper(name, scale, out=tmp_path, root="data")
    trained = {part.words[1] for part in paper.parts if part.trains}
    assert trained == set(filter(load_page("long").has, study.parts_of("long"))) if scale == "medium" else trained
    for part in paper.parts:
        if part.trains:
            assert study.jobs_of(part.words[1], list(part.words[2:]))
            assert part.runs
        else:
            parts.check_command(part)


@pytest.mark.slow
@pytest.mark.parametrize("name", papers.known_papers())
def test_every_part_of_every_paper_runs_in_a_new_folder(name: str, tmp_path: Path) -> None:
    paper = load_paper(name, "small", out=tmp_path / "new" / "out", root="missing")
    for part in paper.parts:
        tool, *words = part.words
        if part.trains:
            words[0] = a_few_runs_of(words[0], tmp_path)
        measured = any(word.endswith("link.json") for word in words)  # a measured link has one number of workers
        short = ("2" if measured and word == "1,4" else word for word in SMALL[tool])
        assert in_this_process(replace(part, words=(tool, *words, *short))) == 0, part
        assert any((part.runs or part.folder).iterdir())
    for claim in paper.claims:
        assert (tmp_path / "new" / "out" / claim.numbers).parent.is_dir(), claim.numbers
        for verdict in verdicts(claim, tmp_path / "new" / "out"):
            assert verdict.verdict in (HOLDS, FAILS, UNDECIDED)
    captions = read_yaml(CONF / "captions.yaml")
    for figure in (tmp_path / "new").rglob("*.png"):
        assert any(figure.stem.startswith(start) for start in captions), figure


def a_few_runs_of(name: str, folder: Path) -> str:
    """Write a study of two runs of another one, which differ in method, form, schedule or workers; returns the file."""
    study, scale = name.split("/")
    content = yaml.safe_load((CONF / "sweep" / f"{study}.yaml").read_text())
    part = content["scales"][scale]
    differ = next(key for key in part["grid"] if key not in ("seed", "task"))
    grid = {key: values[: 1 + (key == differ)] for key, values in part["grid"].items()}
    words = [*content.get("overrides", []), *part.get("overrides", [])]
    file = folder / f"{study}.yaml"
    file.write_text(yaml.safe_dump({"overrides": words, "grid": grid}))
    return str(file)


def test_folders_may_have_spaces_and_quotes_in_their_names(tmp_path: Path) -> None:
    out, root = tmp_path / "Ann's runs, é", str(tmp_path / "data (old)")
    training = load_paper("diloco", "paper", out=out, root=root).parts[0]
    assert training.runs == out / "runs"
    jobs = study.jobs_of(training.words[1], list(training.words[2:]))
    (config, *_) = compose_runs(jobs[:1])
    assert (config.output, config.dataset.root) == (str(out / "runs"), f"{root}/wikitext-103")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("source: nobody", "sauce: nobody", "'source'"),
        ("shows: Two runs", "about: x", "'shows'"),
        ("small: sweep tiny", "small: sweeep tiny", "must begin with one of"),
        ("{runs} --out", "{ruins} --out", "'ruins'"),
        ("parts:", "parts: [", "tiny.yaml"),
        ("parts:", "claims: [{numbers: a.csv}]\nparts:", "missing"),
    ],
)
def test_a_bad_file_is_named(tiny: Path, tmp_path: Path, before: str, after: str, said: str) -> None:
    tiny.write_text(TINY.replace(before, after))
    refused(lambda: load_paper("tiny", "small", out=tmp_path, root="data"), "tiny.yaml", said, error=UserError)


@pytest.mark.parametrize(
    ("words", "said"),
    [("figures --nonsense", "--nonsense"), ("compare --methods micor", "micro"), ("theory --steps -1", "--steps")],
)
def test_a_wrong_command_is_refused_before_anything_runs(words: str, said: str, tmp_path: Path) -> None:
    refused(lambda: parts.check_command(part_of(tmp_path, *words.split())), "part some: ", said, error=UserError)


def test_a_page_escapes_its_input_and_loads_only_files_of_its_folder(tmp_path: Path) -> None:
    part = part_of(tmp_path, "figures", "a=<script>alert(1)</script>")
    part.folder.mkdir()
    (part.folder / "report.md").write_text("# Head\n\n<script>alert(2)</script> ![x](http://example.org/x.png)\n")
    (part.folder / "a figure.png").write_bytes(b"")
    page = write_paper_page(paper_of(part), tmp_path)
    text = page.read_text()
    assert loads(text) == ["some/a%20figure.png"]
    assert "Name &amp; co" in text
    assert "<i>shown" not in text
    assert "best &lt;b&gt;of all&lt;/b&gt;" in text
    assert text.index("Verdicts</h2>") < text.index("<img") < text.index("<h3>Head</h3>")
    assert write_paper_page(paper_of(part), tmp_path).read_text() == text


def test_page_says_what_is_missing(tmp_path: Path) -> None:
    part = part_of(tmp_path, "sweep", "demo", f"output={tmp_path}/runs", name="training")
    text = write_paper_page(paper_of(part_of(tmp_path, "figures"), part), tmp_path).read_text()
    assert "holds no finished run" in text
    assert "No figure: it was not carried out" in text


NUMBERS = pd.DataFrame(
    {
        "method": ["ours", "ours", "ours", "theirs", "theirs", "theirs"],
        "seed": [0, 1, 2, 0, 1, 2],
        "size": [1, 4, 10, 1, 16, 100],
        "cost": [2.0, 3.0, 2.5, 4.0, 3.5, 3.0],
        "busy": [10.0, 11.0, 10.0, 10.0, 12.0, 13.0],
        "form": "",
    }
)
PAIRED = {"value": "cost_beside - cost", "beside": "method == 'theirs'", "per": ["seed"]}  # 2, 0.5, 0.5
SEEDS = PAIRED | {"over": "seed", "here": "{mean:.2f} ± {half:.2f}"}
ALONG = {"value": "cost_beside - cost", "beside": "method == 'theirs'", "along": "size"}
VERDICTS = {  # of a claim on NUMBERS: what it asks beside rows "method == 'ours'", and its answer
    "2 to 3, 3 of 3 | holds": {"at_most": 3},
    "2 to 3, 2 of 3 | does not hold": {"at_most": 2.9},
    "Ours: 2 to 3, 3 of 3 | holds": {"at_most": 3, "each": ["kind"], "rows": "method == 'ours'"},
    "0.5 to 2, 3 of 3 | holds": {"at_least": 0.5, **PAIRED},
    "1.00 ± 2.15 | undecided": {"at_least": 0, **SEEDS},
    "1.00 ± 2.15 | holds": {"at_least": -2, **SEEDS},
    "1.00 ± 2.15 | does not hold": {"at_least": 4, **SEEDS},
    "2 ± inf | undecided": {
        "at_least": 0,
        **SEEDS,
        "rows": "method == 'ours' and seed == 0",
        "here": "{mean:g} ± {half}",
    },
    "differs by a factor of 1.30 between paired runs | undecided": {"at_least": 0.5, **PAIRED, "steady": "busy"},
    "0.75 to 2, 3 of 3 | holds": {"at_least": 0, **ALONG},
    "0.75 to 2, 2 of 2 | holds": {"at_least": 0, **ALONG, "rows": "method == 'ours' and size < 10 or size == 1000"},
    "nothing to compare | undecided": {"at_least": 0, "rows": "method == 'nobody'"},
    "there is no other.csv | undecided": {"at_least": 0, "numbers": "other.csv"},
}


def asked(tmp_path: Path, **asked: Any) -> str:
    NUMBERS.assign(kind="Ours").to_csv(tmp_path / "n.csv", index=False)
    usual = {
        "says": "",
        "source": "",
        "numbers": "n.csv",
        "rows": "method == 'ours'",
        "value": "cost",
        "here": "{least:g} to {most:g}, {there} of {all}",
    }
    (found,) = verdicts(Claim(**usual | asked), tmp_path)
    return f"{found.here} | {found.verdict}"


@pytest.mark.parametrize("said", VERDICTS)
def test_a_verdict_is_drawn_from_the_numbers(said: str, tmp_path: Path) -> None:
    assert said in asked(tmp_path, **VERDICTS[said])


def test_a_claim_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    refused(lambda: asked(tmp_path, value="prize", at_least=0), "n.csv", "prize", error=UserError)
    refused(lambda: asked(tmp_path), "at_least or at_most", error=ValueError)


def test_a_reproduction_runs_once_and_again_finds_nothing_to_do(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, carried_out = tmp_path / "out", list[str]()
    (tmp_path / "conf/sweep").mkdir(parents=True)
    (tmp_path / "conf/sweep/tiny.yaml").write_text(TINY_STUDY)
    monkeypatch.setattr(study, "CONF", tmp_path / "conf")
    monkeypatch.setattr(parts, "run", lambda part: carried_out.append(part.name) or in_this_process(part))
    words = ["tiny", "--out", str(out), "seed=3", "cluster.num_threads=1"]
    threads = torch.get_num_threads()
    assert reproduce.main(words) == 0
    assert torch.get_num_threads() == threads
    page = (out / "index.html").read_bytes()
    assert b"Top-k" in page
    (run,) = (out / "runs").glob("*topk*")
    assert run.name in (out / "curves/residual-mlp-digits-n2-d0.01.runs.txt").read_text()
    assert json.loads((run / "manifest.json").read_text())["num_threads"] == 1
    assert loads(page.decode())
    assert all((out / source).exists() for source in loads(page.decode()))
    capsys.readouterr()
    assert reproduce.main(words) == 0
    assert carried_out == ["training", "curves"]
    assert capsys.readouterr().out.count("nothing to do") == 2
    assert (out / "index.html").read_bytes() == page
    monkeypatch.setattr(parts, "git_state", lambda folder: {"revision": "another"})
    assert reproduce.main(words) == 0
    assert carried_out == ["training", "curves", "curves"]


def in_this_process(part: Part) -> int:
    """Do what the part's command does; starting a process of its own takes a while."""
    if not part.trains:
        return int(importlib.import_module(f"experiments.{part.words[0]}").main(part.words[1:]))
    for config in parts.runs_of(part):
        execute(config)
    return 0


def test_a_part_that_fails_ends_the_study_with_its_command(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.write_text(TINY.replace("sweep tiny output={runs}", "figures --runs {runs} --out {here}"))
    assert reproduce.main(["tiny", "--out", str(tmp_path / "out")]) == 1
    said = capfd.readouterr()
    assert "[1/2] training" in said.out
    assert "curves" not in said.out
    words = shlex.split(said.err.splitlines()[-1])
    assert words[:3] == [sys.executable, "-m", "experiments.figures"]
    assert figures.main(words[3:]) == 2


def test_a_signal_stops_the_command_that_runs(tmp_path: Path) -> None:
    words = ["compare", "--numel", "100000", "--steps", "500", "--streams", "normal", "--out", str(tmp_path / "out")]
    part = part_of(tmp_path, *words)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as stopped:
        parts.run(part)
    assert stopped.value.code == 128 + signal.SIGTERM
