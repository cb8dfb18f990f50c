"""Every method is named and drawn as its yaml says; one without a yaml has stable defaults."""

from pathlib import Path

import pytest

from experiments.reports import names
from experiments.reports.names import description, human, in_order, label
from experiments.reports.plot_style import look

METHODS = sorted(path.stem for path in names.METHODS.glob("*.yaml"))


def test_every_method_says_its_label_its_look_and_its_place() -> None:
    incomplete = [name for name in METHODS if set(description(name)) != {"label", "drawn", "order"}]
    assert incomplete == []


@pytest.mark.parametrize("key", ["label", "drawn", "order"])
def test_no_two_methods_say_the_same(key: str) -> None:
    said = [description(name)[key] for name in METHODS]
    assert sorted(said) == sorted(set(said))


def test_every_look_can_be_drawn() -> None:
    looks = [look(name) for name in METHODS]
    assert [look.name for look in looks] == [label(name) for name in METHODS]
    assert len({(look.color, look.dashes, look.marker) for look in looks}) == len(METHODS)


def test_a_method_without_a_yaml_is_called_by_its_key_and_comes_last() -> None:
    assert label("my_method") == "my_method"
    assert label("my_method", "lr=1") == "my_method (lr=1)"
    assert look("my_method") == look("my_method")
    assert in_order(["other", "my_method", "micro", "dense"]) == ["dense", "micro", "my_method", "other"]


def test_a_new_yaml_needs_no_other_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("# label: Mine, new\n# drawn: sky long p\n# order: 5\nname: mine\n")
    (tmp_path / "plain.yaml").write_text("name: plain # label: none\n")
    monkeypatch.setattr(names, "METHODS", tmp_path)
    description.cache_clear()
    try:
        assert (label("mine"), label("plain")) == ("Mine, new", "plain")
        assert look("mine").marker == "p"
        assert in_order(["plain", "mine"]) == ["mine", "plain"]
    finally:
        description.cache_clear()


def test_models_and_data_sets_have_names() -> None:
    assert human("resnet18") == "ResNet-18"
    assert human("my_model") == "my_model"
