"""The parts of a paper's reproduction: conf/paper/NAME.yaml, read and checked."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from experiments.config.checks import CHOICES
from experiments.config.errors import UserError, check_choice, one_line
from experiments.config.paths import CONF
from experiments.studies.paper_reproduction.verdicts import Question

FOLDER = CONF / "paper"
MODULES = ("sweep", "figures", "compare", "theory", "simulate", "profile")  # of experiments, that a part may call
SWEEP = "sweep"
SCALES = (
    *CHOICES["scale"],
    "medium",
)  # medium: small models on real data, until dense stops to improve; few papers have it
KEYS = {"name", "source", "parts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One command of a reproduction.

    Attributes:
        name: of its folder.
        shows: what it shows, in words.
        claim: what the paper says of that; empty where it is not known.
        verdicts: whether that holds here, asked of what the command writes.
        words: the command, a module of experiments first.
        folder: where it writes, unless it trains.
    """

    name: str
    shows: str
    words: tuple[str, ...]
    folder: Path
    claim: str = ""
    verdicts: tuple[Question, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether this is a study of conf/sweep."""
        return self.words[0] == SWEEP

    @property
    def runs(self) -> Path | None:
        """The folder of the runs that it trains."""
        named = [word.removeprefix("output=") for word in self.words if word.startswith("output=")]
        return Path(named[-1]) if named else None

    @property
    def arguments(self) -> list[str]:
        """What Python is called with."""
        return ["-m", f"experiments.{self.words[0]}", *self.words[1:]]

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        return shlex.join(["python", *self.arguments])


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A paper's reproduction at one scale: what it is called, where it appeared, and the parts in their order."""

    key: str
    name: str
    source: str
    scale: str
    parts: tuple[Part, ...]


def known_papers() -> list[str]:
    """Return the names of all papers."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_paper(key: str, scale: str, *, out: Path, root: str, overrides: Sequence[str] = ()) -> Paper:
    """Return a paper's reproduction at a scale.

    Args:
        out: the folder that everything is written to.
        root: the folder of data sets.
        overrides: further settings of every run.

    Raises:
        UserError: no such paper or scale, a paper without it, or its file is not one.
    """
    check_choice("paper", known_papers(), key)
    check_choice("scale", SCALES, scale)
    path = FOLDER / f"{key}.yaml"
    content = _read(path)
    parts = []
    for name, given in content["parts"].items():
        if not isinstance(given, dict) or "shows" not in given:
            raise UserError(f"{path}: part {name} must say what it shows, and its command as {' or '.join(SCALES)}")
        if scale in given:
            places = {"out": out, "here": out / name, "runs": out / "runs", "root": root}
            words = _command(given[scale], places, path)
            words += overrides if words[0] == SWEEP else ()
            told = {"claim": given.get("claim", ""), "verdicts": _questions(given.get("verdicts", ()), name, path)}
            parts.append(Part(name=name, shows=given["shows"], words=tuple(words), folder=out / name, **told))
    if not parts:
        raise UserError(f"paper {key} has nothing at scale {scale}: choose one of {', '.join(_scales(content))}")
    return Paper(key=key, name=content["name"], source=content["source"], scale=scale, parts=tuple(parts))


def _scales(content: dict[str, Any]) -> list[str]:
    """Return the scales that a paper has commands for."""
    return [scale for scale in SCALES if any(scale in given for given in content["parts"].values())]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{path}: {one_line(error)}") from None
    if not isinstance(content, dict) or set(content) != KEYS or not isinstance(content["parts"], dict):
        raise UserError(f"{path} must have the keys {', '.join(sorted(KEYS))}, parts being a mapping")
    return {str(key): value for key, value in content.items()}


def _questions(given: Sequence[Mapping[str, Any]], part: str, path: Path) -> tuple[Question, ...]:
    try:
        return tuple(Question(**each) for each in given)
    except TypeError as error:
        raise UserError(f"{path}: verdicts of part {part}: {one_line(error)}") from None


def _command(text: str, places: dict[str, Any], path: Path) -> list[str]:
    """Return the words of a command, the names of folders in braces replaced."""
    words = [_filled_in(word, places, path) for word in shlex.split(text)]
    if words[0] not in MODULES:
        raise UserError(f"{path}: a command must begin with one of {', '.join(MODULES)}, got '{words[0]}'")
    return words


def _filled_in(word: str, places: dict[str, Any], path: Path) -> str:
    try:
        return word.format(**places)
    except (KeyError, IndexError, ValueError):
        known = ", ".join(f"{{{name}}}" for name in places)
        raise UserError(f"{path}: '{word}' must have no other braces than {known}") from None
