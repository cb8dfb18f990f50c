"""Parts of one name and several rules: a class for each, which yaml and ``micro.build`` choose by the word ``rule``."""

from typing import Any

import pytest

import micro
from micro.parts import rules
from tests.sparsifiers import TABLE

SETTINGS: dict[str, dict[str, Any]] = {"accordion": {"density": 0.1, "high": 0.2, "interval": 2}}
KINDS = (micro.Selector, micro.Exchange, micro.Codec, micro.Density)
CASES = [(kind, name, rule) for kind in KINDS for name, words in rules(kind).items() for rule in words]


@pytest.mark.parametrize(("kind", "name", "rule"), CASES)
def test_a_rule_chooses_a_class_which_names_it(kind: Any, name: str, rule: str | None) -> None:
    settings = SETTINGS.get(name, {})
    part = micro.build(kind, {"name": name, "rule": rule, **settings})
    assert (part.name, part.rule_name) == (name, rule)
    assert (part == micro.build(kind, {"name": name, **settings})) == (rule == rules(kind)[name][0])
    assert type(part).__name__ in micro.__all__


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in rules(kind)])
def test_a_wrong_rule_is_refused_with_those_there_are(kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"rule of {name} must be .*published.*, got 'newest'"):
        micro.build(kind, {"name": name, "rule": "newest", **SETTINGS.get(name, {})})


def test_published_is_never_the_default() -> None:
    assert all(words[0] != "published" for kind in KINDS for words in rules(kind).values())


def test_every_rule_has_a_row_of_the_table() -> None:
    reducers = [row.make(0.05, 0) for row in TABLE]
    sparse = [reducer for reducer in reducers if isinstance(reducer, micro.SparseReducer)]
    used = {(part.name, part.rule_name) for r in sparse for part in (r.selector, r.exchange, r.codec, r.density_policy)}
    assert {(name, rule) for _, name, rule in CASES} <= used


def test_a_setting_of_another_rule_says_whose_it_is() -> None:
    message = "reevaluate of reused is a setting of rule=published, got rule=repaired"
    with pytest.raises(ValueError, match=message):
        micro.build(micro.Selector, {"name": "reused", "reevaluate": 5})


def test_a_setting_that_no_rule_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="selector gaussiank has rule, got 'rules'; did you mean 'rule'"):
        micro.build(micro.Selector, {"name": "gaussiank", "rules": "published"})


@pytest.mark.parametrize(
    ("selector", "saved"),
    [
        (micro.PublishedGaussianK(), {"track": {"age": 3}}),
        (micro.PublishedRedSync(), {"floor": None}),
        (micro.Sage(), {"threshold": None, "mean": 0.0, "correction": {"track": {"age": 3}}}),
        (micro.PublishedSage(), {"threshold": 0.5, "mean": 0.1, "correction": {"track": {"age": 0}}}),
        (micro.PublishedSidco(), {"stages": 2, "calls": 1, "excess": 0.5, "corrections": {}}),
    ],
    ids=str,
)
def test_states_that_older_versions_saved_can_be_loaded(selector: micro.Selector[Any], saved: dict[str, Any]) -> None:
    kept = selector.save(selector.load(saved))
    assert set(kept) <= set(saved)
    assert selector.save(selector.load(kept)) == kept
