"""Name the method of a configuration: the yaml of conf/sparsifier with exactly its parts.

If no yaml has these parts, the nearest yaml's name and the difference: ``topk+exchange_oktopk``.
"""

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from experiments.config import CONF
from experiments.config.conf_files import choices_of, read_yaml, retired
from experiments.config.keys import Flat, defaults_of_schema, flat
from experiments.config.schema import SparsifierConfig, TrainConfig

METHODS = CONF / "sparsifier"
PARTS = ("reducer", "selector", "fit", "exchange", "codec", "indices", "feedback", "policy")
MOST_LETTERS = 100  # longest name; it becomes part of a folder name
COMMENT = re.compile(r"# (label|legend|order): (.+)")

Parts = dict[str, str]


class Method(NamedTuple):
    """A method that a yaml describes: its flat settings, and the words of its parts."""

    settings: Flat
    parts: Parts


def method_of(config: TrainConfig) -> str:
    """Return the name of the method that a run trains with."""
    return method_name(dataclasses.asdict(config.sparsifier))


def method_name(sparsifier: Mapping[str, Any]) -> str:
    """Return the name of the method that the group ``sparsifier`` of a configuration describes, nested or flat.

    Settings of parts do not change it, unless another yaml has the same: see ``own_settings``. A name that no yaml has
    is the user's own, and stays.
    """
    settings, known = flat(sparsifier), known_methods()
    given, own = str(settings.get("name")), parts_of(settings)
    if given not in known or not own.keys() & {"reducer", "selector"}:
        return given
    same = [name for name, method in known.items() if method.parts == own]
    if same:
        away = {name: _num_differing(settings, known[name].settings) for name in same}
        return (
            given
            if away.get(given, 0) and min(away.values())
            else min(same, key=lambda name: (away[name], name != given))
        )
    main = "selector" if "selector" in own else "reducer"
    near = [name for name, method in known.items() if _words(main, method.parts) == _words(main, own)]
    if near:
        base = min(near, key=lambda name: (len(_differing(own, known[name].parts)), name != given))
        differing = _differing(own, known[base].parts)
    else:  # a part without a yaml, such as another package's
        base = "_".join(_words(main, own))
        base = f"{base}_{main}" if base in known else base
        differing = [part for part in _differing(own, parts_of(defaults_of_schema(SparsifierConfig))) if part != main]
    words = [f"{part}_{'_'.join(_words(part, own)) or 'none'}" for part in differing]
    return re.sub(r"[^\w.+-]", "_", "+".join([base, *words]))[:MOST_LETTERS]


def own_settings(sparsifier: Mapping[str, Any]) -> Flat:
    """Return the settings of parts, by dotted keys, that are not those of the method's yaml."""
    settings, name = flat(sparsifier), method_name(sparsifier).split("+")[0]
    known = known_methods()
    if name == settings["name"] and name not in known:
        return {}  # the user's own name replaces them
    usual = _of_parts(known[name].settings) if name in known else {}
    return {key: value for key, value in _of_parts(settings).items() if key not in usual or usual[key] != value}


def words_of(method: str) -> list[str]:
    """Return the command-line words that choose a method by name."""
    base, *others = method.split("+")
    return [f"sparsifier={base}", *(f"sparsifier.{word.replace('_', '=', 1)}" for word in others)]


def parts_of(settings: Flat) -> Parts:
    """Return the words of the parts in a flat sparsifier, and their rules if these are not the defaults."""
    found = {}
    for key, value in settings.items():
        part = key.removesuffix(".name")
        if part.rpartition(".")[2] in PARTS and value is not None:
            found[part] = str(value)
    for part, name in list(found.items()):
        rule = settings.get(f"{part}.rule")
        if rule not in (None, usual_rules().get((part.rpartition(".")[2], name))):
            found[f"{part}.rule"] = str(rule)
    return found


@cache
def known_methods() -> dict[str, Method]:
    """Return the methods of conf/sparsifier in the order that their files state."""
    return {name: Method(settings, parts_of(settings)) for name, settings in _in_files().items()}


@cache
def usual_rules() -> dict[tuple[str, str], str | None]:
    """Return the default rule of a part, by kind and name: that of the first yaml with the part."""
    rules: dict[tuple[str, str], str | None] = {}
    for settings in _in_files().values():
        for key, value in settings.items():
            part = key.removesuffix(".name")
            if part.rpartition(".")[2] in PARTS:
                rules.setdefault((part.rpartition(".")[2], str(value)), settings.get(f"{part}.rule"))
    return rules


@cache
def description(method: str) -> dict[str, str]:
    """Return label, order and description of a method, from its yaml or of a retired one; otherwise nothing."""
    path = METHODS / f"{method}.yaml"
    if not path.is_file():
        return {key: str(value) for key, value in retired("sparsifier").get(method, {}).items()}
    comments = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    words = " ".join(line[2:] for line in comments if not COMMENT.fullmatch(line))
    return {match[1]: match[2] for line in comments if (match := COMMENT.fullmatch(line))} | {"words": words}


def place(method: str) -> tuple[float, str]:
    """Return the position of a method in tables: from its yaml, or the nearest one."""
    return float(description(method.split("+")[0]).get("order", "inf")), method


def _in_files() -> dict[str, Flat]:
    defaults = defaults_of_schema(SparsifierConfig)
    return {
        name: flat(defaults | read_yaml(METHODS / f"{name}.yaml"))
        for name in sorted(choices_of("sparsifier"), key=place)
    }


def _words(part: str, parts: Parts) -> list[str]:
    """Return the words of a part, of its inner parts, and of their rules."""
    return [word for key, word in sorted(parts.items()) if key.split(".")[0] == part]


def _differing(own: Parts, of: Parts) -> list[str]:
    return [part for part in PARTS if _words(part, own) != _words(part, of)]


def _of_parts(settings: Flat) -> Flat:
    """Return the settings of parts, without names and rules."""
    return {key: value for key, value in settings.items() if key.rpartition(".")[2] not in ("name", "rule", *PARTS)}


def _num_differing(own: Flat, of: Flat) -> int:
    own, of = _of_parts(own), _of_parts(of)
    return sum(own.get(key) != of.get(key) for key in own.keys() | of.keys())
