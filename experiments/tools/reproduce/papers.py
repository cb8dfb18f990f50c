"""Read and check the parts of a paper's reproduction from conf/paper/NAME.yaml."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import CONF
from experiments.config.conf_files import check_name, read_yaml
from experiments.config.errors import UserError, check_choice, one_line
from experiments.tools.reproduce.verdicts import Claim

FOLDER = CONF / "paper"
MODULES = ("sweep", "figures", "compare", "theory", "simulate", "profile")  # that a part may run
SWEEP = "sweep"
SCALES = {
    "small": "tiny models and data that need no download, for minutes on a laptop",
    "medium": "small models on real data, trained as long as dense training improves",
    "paper": "the paper's models, data, epochs and workers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One command of a reproduction: ``words``, a module of experiments first.

    Attributes:
        shows: what it shows, in words.
        folder: where it writes, unless it trains.
    """

    name: str
    shows: str
    words: tuple[str, ...]
    folder: Path

    @property
    def trains(self) -> bool:
        """Whether this is a study of conf/sweep."""
        return self.words[0] == SWEEP

    @property
    def runs(self) -> Path | None:
        """The folder of its runs."""
        named = [value_of(word) for word in self.words if word.startswith("output=")]
        return Path(named[-1]) if named else None

    @property
    def arguments(self) -> list[str]:
        """The arguments for Python."""
        return ["-m", f"experiments.{self.words[0]}", *self.words[1:]]

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        return shlex.join(["python", *self.arguments])


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A paper's reproduction at one scale: its name, where it appeared, what it claims, the parts in their order.

    ``known`` says what is known of the paper's text and figures, and from where.
    """

    key: str
    name: str
    source: str
    scale: str
    parts: tuple[Part, ...]
    claims: tuple[Claim, ...] = ()
    known: str = ""


def known_papers() -> list[str]:
    """Return the names of all papers."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_paper(key: str, scale: str, *, out: Path, root: str, overrides: Sequence[str] = ()) -> Paper:
    """Return a paper's reproduction at a scale, written to ``out``, with data of ``root`` and overrides for every run.

    Raises:
        UserError: no such paper or scale, a paper without it, or its file is not one.
    """
    check_name("paper", known_papers(), key)
    check_choice("scale", SCALES, scale)
    path = FOLDER / f"{key}.yaml"
    places = {"out": out, "runs": out / "runs", "root": root}
    try:
        content: Any = read_yaml(path)
        own = {name: given for name, given in content["parts"].items() if scale in given}
        parts = [
            _part(name, given, given[scale], places | {"here": out / name}, overrides) for name, given in own.items()
        ]
        name, source, known = content["name"], content["source"], content.get("known", "")
        claims = tuple(Claim(**each) for each in content.get("claims", ()))
    except (AttributeError, ValueError, TypeError) as error:
        raise UserError(f"{path}: {one_line(error)}") from None
    except KeyError as error:
        raise UserError(
            f"{path}: {error} is missing, or stands in braces and is none of {{out}}, {{here}}, {{runs}}, {{root}}"
        ) from None
    if not parts:
        others = [each for each in SCALES if any(each in given for given in content["parts"].values())]
        raise UserError(f"paper {key} has nothing at scale {scale}: choose one of {', '.join(others)}")
    return Paper(key=key, name=name, source=source, scale=scale, parts=tuple(parts), claims=claims, known=known)


def _part(name: str, given: Mapping[str, Any], command: str, places: dict[str, Any], overrides: Sequence[str]) -> Part:
    """Return a part, with the folders in braces filled in."""
    words = [_placed(word, places) for word in shlex.split(command)]
    if words[0] not in MODULES:
        raise ValueError(f"a command must begin with one of {', '.join(MODULES)}, got '{words[0]}'")
    words += overrides if words[0] == SWEEP else ()
    return Part(name=name, words=tuple(words), folder=places["here"], shows=given["shows"])


def value_of(word: str) -> str:
    """Return the VALUE of KEY=VALUE without quotes."""
    value = word.partition("=")[2]
    return value[1:-1].replace("\\'", "'") if value.startswith("'") else value


def _placed(word: str, places: Mapping[str, Any]) -> str:
    """Return a word with the folders in braces filled in, quoted if Hydra needs quotes."""
    key, equals, value = word.partition("=")
    placed = value.format(**places)
    if placed != value and not re.fullmatch(r"[\w./-]*", placed, re.ASCII):
        placed = "'{}'".format(placed.replace("'", "\\'"))
    return f"{key.format(**places)}{equals}{placed}"
