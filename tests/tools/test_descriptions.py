"""The configuration in words, as its page shows it; the command's help is Hydra's."""

from pathlib import Path

import yaml

from docs.descriptions import choices, described, read, train_keys
from experiments import train
from experiments.config import CONF
from experiments.config.schema import GROUPS
from tests.dist.rank_functions import called


def test_every_key_of_the_main_file_is_there_with_its_value() -> None:
    composed = yaml.safe_load((CONF / "train.yaml").read_text())
    keys = {key.name: yaml.safe_load(key.value) for key in train_keys()}
    assert keys == {
        name.removesuffix("_"): value for name, value in composed.items() if name not in ("defaults", "hydra")
    }


def test_a_comment_belongs_to_the_key_before_it(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(
        "# Opens\n# the file.\na: 1 # first\nb: {c: 2} # second\nd: # third\n  e: [x, y] # fourth\nf: g#h\n"
    )
    choice = read(file)
    assert choice.comment == "Opens the file."
    assert [(key.name, key.value, key.comment) for key in choice.keys] == [
        ("a", "1", "first"),
        ("b", "{c: 2}", "second"),
        ("d.e", "[x, y]", "fourth"),
        ("f", "g#h", ""),
    ]


def test_every_key_and_choice_says_what_it_means() -> None:
    keys = {f"{group}.{key.name}": key.comment for group in GROUPS for key in described(group)}
    keys |= {key.name: key.comment for key in train_keys()}
    for group in set(GROUPS) - {"sparsifier"}:
        keys |= {f"{group}={choice.name}": choice.comment for choice in choices(group).values()}
    assert [name for name, comment in keys.items() if not comment] == []


def test_the_help_names_every_choice_and_key() -> None:
    for word in ("-h", "--help"):
        shown = called(train.main, word)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert all(f"{group}: " in shown.stdout for group in GROUPS)
        assert all(f"{key.name.split('.')[0]}:" in shown.stdout for key in train_keys())
    assert "epochs: 3" in called(train.main, "--help", "epochs=3").stdout
