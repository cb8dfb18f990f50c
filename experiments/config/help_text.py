"""The help of experiments.train: every group, choice and key in words, read from conf/ and the dataclasses."""

import textwrap
from collections.abc import Iterator

from experiments.config.descriptions import GROUPS, Key, about, choices, default_choices, described, train_keys

_WIDTH = 118
_FLAGS = """\
options:
  -m, --multirun  run every combination of the values that words name, separated by commas
  --cfg job       print the configuration, start nothing
  -h, --help      print this
"""


def train_help(opening: str) -> str:
    """Return the help, beginning with what the command is about."""
    parts = [opening.strip(), "", _FLAGS]
    parts.append("GROUP=CHOICE takes the settings of a file, conf/GROUP/CHOICE.yaml; KEY=VALUE sets one of them.")
    for group in GROUPS:
        parts += ["", *_group(group)]
    parts += ["", "Keys of the run itself:", *(line for key in train_keys() for line in _key("", key))]
    return "\n".join(parts)


def _group(group: str) -> Iterator[str]:
    chosen = default_choices().get(group)
    says = about(group) or "Settings of a study, one file each: what its paper trains, with which method."
    yield from _wrapped(f"{group}={chosen or 'NAME'}", says, indent=2)
    for choice in choices(group).values():
        yield from _wrapped(f"    {choice.name}", choice.comment, indent=6)
    for key in described(group):
        yield from _key(f"{group}.", key)


def _key(prefix: str, key: Key) -> Iterator[str]:
    yield from _wrapped(f"  {prefix}{key.name}={key.value}", key.comment, indent=6)


def _wrapped(head: str, text: str, *, indent: int) -> list[str]:
    return textwrap.wrap(f"{head}  {text}" if text else head, _WIDTH, subsequent_indent=" " * indent)
