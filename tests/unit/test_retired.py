"""What went is refused in one line that names its successor: imports, parts, settings, words of yamls, saved states."""

import importlib
import shlex
from pathlib import Path

import pytest

import micro
from experiments.config import CONF
from experiments.config.builders import check_parts
from experiments.config.compose import compose_run
from experiments.config.conf_files import choices_of, read_yaml, retired
from experiments.planning.schedules.base import Schedule
from experiments.reports.names import label
from experiments.sweeps.study import jobs_of
from experiments.tools.reproduce.papers import load_paper
from experiments.tools.shared.methods import known_methods, select_names
from micro import retired as gone
from micro.checkpoints import saved_state
from micro.checkpoints.description import describe
from micro.selectors.estimated import Fit
from tests.refusals import refused

KINDS: dict[str, type] = {
    "selector": micro.Selector,
    "exchange": micro.Exchange,
    "codec": micro.Codec,
    "feedback": micro.Feedback,
    "density": micro.Density,
    "fit": Fit,
    "schedule": Schedule,
}
WORDS = [
    (group, name)
    for group in read_yaml(CONF / "retired.yaml")
    if group not in ("key", "paper", "study")
    for name in retired(group)
]
TOPK = micro.SparseReducer(micro.TopK(), 0.1)


@pytest.mark.parametrize("name", gone.NAMES)
def test_a_name_that_went_is_no_longer_imported(name: str) -> None:
    parent, _, last = name.rpartition(".")
    for words in (f"from {parent} import {last}", f"import {name}"):
        refused(lambda: exec(words), name, gone.NAMES[name], error=ImportError)  # noqa: B023
    if parent == "micro":
        refused(lambda: getattr(micro, last), gone.NAMES[name], error=AttributeError)


def test_an_import_of_an_unknown_name_fails_as_usual() -> None:
    refused(lambda: importlib.import_module("micro.nothing"), "No module named", error=ModuleNotFoundError)
    refused(lambda: micro.nothing, "has no attribute", error=AttributeError)


@pytest.mark.parametrize("name", gone.PARTS)
def test_a_part_that_went_is_not_built_and_its_state_not_loaded(name: str) -> None:
    kind, successor = gone.PARTS[name]
    assert name not in micro.known(KINDS[kind])
    refused(lambda: micro.build(KINDS[kind], name), name, successor)
    part = {"name": name, "rule": None, "has_state": False, "settings": {}}
    for settings in ({kind: part}, {"reducer": {"name": "split", "settings": {"inner": [part]}}}):
        _state_is_refused({"name": "sparse", "settings": settings}, name, successor)


@pytest.mark.parametrize(("part", "setting"), gone.SETTINGS)
def test_a_setting_that_went_is_not_taken_and_a_state_with_it_not_loaded(part: str, setting: str) -> None:
    successor, (key, _, value) = gone.SETTINGS[part, setting], setting.partition("=")
    kind = next(kind for kind, base in KINDS.items() if part in micro.known(base))
    refused(lambda: micro.build(KINDS[kind], {"name": part, key: value or 1}), part, setting, successor)
    settings = {kind: {"name": part, "settings": {key: value or 1}}}
    _state_is_refused({"name": "sparse", "settings": settings}, part, setting, successor)


def _state_is_refused(method: dict[str, object], *parts: str) -> None:
    who = {"rank": 0, "world_size": 1, "scope": "bucket"}
    saved = saved_state.header(step=3, method=method, **who) | {"buckets": []}
    refused(lambda: saved_state.check_header(saved, method=describe(TOPK), **who), *parts)


def test_a_state_of_a_part_that_stays_loads_without_what_went_of_it() -> None:
    kept = {"lowest_bits": 5, "shift": 3, "surplus": 2.0}
    agreed, exdyna = micro.Micro(), micro.build(micro.Selector, "exdyna")
    assert agreed.save(agreed.load(kept | {"last": [4]})) == kept
    saved = exdyna.save(exdyna.start())
    assert exdyna.load(saved | {"threshold": kept | {"last": []}}).threshold == agreed.load(kept)


@pytest.mark.parametrize(("group", "name"), WORDS)
def test_a_word_that_went_is_refused_with_what_to_use(group: str, name: str) -> None:
    own = retired(group)[name]
    assert name not in choices_of(group)
    refused(lambda: compose_run([f"{group}={name}"]), f"{group}={name}", own["use"])
    if group == "sparsifier":
        refused(lambda: select_names([name], known_methods(), "method"), own["use"])
        others = {label(each) for each in known_methods() if own["use"] != f"sparsifier={each}"}  # one had another name
        assert label(name) == own["label"] not in others
    config = compose_run([*shlex.split(own["use"]), "optimizer.momentum=0", "optimizer.nesterov=none"])
    if group != "schedule":  # schedules may need measured files
        check_parts(config)


def test_a_key_that_went_is_refused_with_what_to_use() -> None:
    refused(lambda: compose_run(["scale=small"]), "scale", "experiment=small/NAME")


@pytest.mark.parametrize("paper", retired("paper"))
def test_a_paper_that_went_is_refused_with_what_to_use(paper: str) -> None:
    refused(lambda: load_paper(paper, "small", out=Path("x"), root=""), paper, f"use {retired('paper')[paper]['use']}")


@pytest.mark.parametrize("study", retired("study"))
def test_a_study_that_went_is_refused_with_what_to_use(study: str) -> None:
    refused(lambda: jobs_of(f"{study}/small", []), study, f"use {retired('study')[study]['use']}")
