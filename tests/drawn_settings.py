"""Words of a command line that set a training, drawn by hypothesis: any value for any key, and likely ones.

Keys come from the dataclasses of experiments.config, parts and their settings from micro, models and data: a new one is
drawn without a change here.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from functools import cache, partial
from itertools import chain
from typing import Any, Literal, get_args

from hypothesis import strategies as st
from omegaconf import OmegaConf

import micro
from data.augment import AUGMENTATIONS
from experiments.config.checks import DEVICES, PRECISIONS, RESIZES, SCALES, SHAPES
from experiments.config.compose import composed, hydra_of_conf
from experiments.config.conf_files import TOOLS, choices_of
from experiments.config.optimizer_settings import CHOICES as OPTIMIZER
from experiments.config.paths import CONF
from experiments.config.schema import TrainConfig
from experiments.config.tracking_settings import MODES
from micro.parts import Part, Rule, known
from micro.scope import Scope

Words = list[str]
NASTY = (
    *(
        "",
        " ",
        "\0",
        "\n",
        "a\nb",
        "'",
        '"',
        "\\",
        "a\\'",
        "=",
        ",",
        "[",
        "{",
        "(",
        "#",
        "%",
        "é",
        "\udce9",
        "\u2028",
        "٣",
    ),
    *(
        "null",
        "true",
        "nan",
        "-inf",
        "1e-400",
        "1e400",
        "0x10",
        "1_000",
        "-0",
        "5",
        "0.5",
        "2026-01-01",
        "12:30",
        "???",
    ),
    *("${", "${seed}", "${lr}${lr}", "${oc.env:HOME}", "${at:1}", "${at:1,2}", "${nope:}", "${output}", "\\${seed}"),
    *(
        "~",
        "~nobody/x",
        "..",
        "a/b",
        "x.json",
        "localhost:99999",
        "[::1]:0",
        "::",
        "*",
        "$(true)",
        "<script>",
        "%s",
        "{0}",
    ),
    *("a" * 5000, "9" * 5000, "a/" * 2500, "[" * 500, "(" * 500, "é" * 300),
)
EDGES = (0, 1, -1, 2, 3, 10, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**20, 10**400)
CHOICES = sorted(  # words that some setting has
    {
        *(*DEVICES, *SCALES, *SHAPES, *PRECISIONS, *RESIZES, *MODES, *AUGMENTATIONS, *get_args(Scope)),
        *("skip", "slurm", *chain(*OPTIMIZER.values())),
    }
)
TEXTS = st.one_of(st.sampled_from(NASTY), st.text(max_size=20), st.text("abc019 _.,:=[]{}()'\"\\$~/-+", max_size=20))
WHOLE = st.one_of(st.sampled_from(EDGES), st.integers(-3, 40), st.integers())
NUMBERS = st.one_of(
    st.floats(), st.floats(0, 1), st.sampled_from([1e-320, 1e308, 0.01, 0.5, 1.0, -0.0, 1e-9, 5.5]), WHOLE
)
SCALARS = st.one_of(st.none(), st.booleans(), WHOLE, NUMBERS, TEXTS)
KEYS = st.one_of(
    st.sampled_from(["a", "name", "rule", "5", "null"]), st.text("aé_.-0", min_size=1, max_size=3), SCALARS
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
PARTS: dict[str, type[Part]] = {
    "reducer": micro.Reducer,
    "selector": micro.Selector,
    "exchange": micro.Exchange,
    "codec": micro.Codec,
    "indices": micro.IndexCodec,
    "feedback": micro.Feedback,
    "policy": micro.Density,
}
IN_EPOCHS = ("interval_epochs", "high_factor")  # what a policy has on a command line alone


def keys_of(kind: type = TrainConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of every setting and its type."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        declared = hints[field.name]
        if dataclasses.is_dataclass(declared):
            yield from keys_of(typing.cast(type, declared), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", declared


def likely(declared: Any) -> st.SearchStrategy[Any]:
    """Return values of a declared type, right or nearly so."""
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(likely, inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (list, tuple):
        return st.lists(likely(inner[0]), max_size=3)
    for base in PARTS.values():
        if isinstance(declared, type) and issubclass(declared, base):
            return part(base)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: WHOLE,
        float: NUMBERS,
        bool: st.booleans(),
        str: st.sampled_from(CHOICES) | TEXTS,
    }
    return simple.get(declared, ANYTHING)


def settings(allowed: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return mappings of settings: of those that are allowed, sometimes with values of any type or other keys."""
    right = [st.tuples(st.just(name), likely(kind)) for name, kind in allowed.items()]
    wrong = st.tuples(st.sampled_from([*allowed]) | KEYS if allowed else KEYS, ANYTHING)
    return st.lists(mostly(st.one_of(right), wrong) if right else wrong, max_size=3).map(dict)


def fields_of(base: type[Part], name: str) -> dict[str, Any]:
    """Return the settings of a part of micro and their types."""
    chosen = known(base)[name]
    hints = typing.get_type_hints(chosen)
    own = {field.name: hints[field.name] for field in dataclasses.fields(chosen)}  # type: ignore[arg-type]
    if base is micro.Density:
        own |= dict.fromkeys(IN_EPOCHS, float)
    return {"rule": Rule, **own} if hasattr(chosen, "rule") else own


@cache
def part(base: type[Part]) -> st.SearchStrategy[Any]:
    """Return specifications of parts of a kind: a name, or a mapping of name and settings."""
    return st.deferred(lambda: _specifications(base))


def _specifications(base: type[Part]) -> st.SearchStrategy[Any]:
    names = sorted(known(base))
    named = [settings(fields_of(base, name)).map(partial(_named, name)) for name in names]
    return st.one_of(st.sampled_from(names), *named)


def _named(name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, **given}


def written(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if isinstance(value, str):
        escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
        return f"'{escaped}'"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_key(key)}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written, value)) + "]"
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else repr(value)


def _key(key: Any) -> str:
    """Return the key of a mapping, which Hydra reads without quotes alone."""
    return key if isinstance(key, str) and re.fullmatch(r"[\w.-]+", key) else written(key)


GROUPS = {
    path.name: choices_of(path.name) for path in sorted(CONF.iterdir()) if path.is_dir() and path.name not in TOOLS
}
SMALL = {"model": "mlp", "dataset": "synthetic", "cluster": "simulated"}  # what needs no files, and combines
TYPES = dict(keys_of())
SPECS = {f"sparsifier.{key}": part(base) for key, base in PARTS.items()}


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of every setting and every group of a composed configuration, with its value."""
    for name, value in values.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")


def value_of(key: str, held: Any) -> st.SearchStrategy[Any]:
    """Return values for a key: of the kind that it has, of its declared type, or of any."""
    if key in SPECS:
        return mostly(SPECS[key], ANYTHING)
    if isinstance(held, dict):
        return mostly(settings({name: type(inner) for name, inner in held.items()}), ANYTHING)
    return mostly(likely(TYPES.get(key, type(held))), ANYTHING)


def mostly(often: st.SearchStrategy[Any], seldom: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return values of the first kind, and of the second in one case of eight."""
    return st.sampled_from([often] * 7 + [seldom]).flatmap(lambda kind: kind)


def word_of(key: str, held: Any) -> st.SearchStrategy[str]:
    """Return words that set a key, in Hydra's grammar or not."""
    texts = mostly(value_of(key, held).map(written), TEXTS)
    if key == "output":  # a trial file is written there
        texts = texts.map(lambda text: re.sub(r"/|~|\$|\.\.", "", text))
    return texts.map(lambda text: f"{key}={text}")


@st.composite
def words(draw: st.DrawFn) -> Words:
    """Draw choices of groups and up to three settings of what they compose."""
    choices = draw(
        st.one_of(st.just(SMALL), st.just({}), st.lists(st.sampled_from([*GROUPS]), max_size=3).flatmap(some))
    )
    if draw(st.booleans()):
        choices = {**choices, **draw(some(["sparsifier", "optimizer"]))}
    chosen = [f"{group}={name}" for group, name in choices.items()]
    with hydra_of_conf():
        held = dict(flat(OmegaConf.to_container(composed(chosen))))
    single = st.sampled_from([key for key in held if key not in GROUPS])
    keys = draw(st.lists(mostly(single, st.sampled_from([*GROUPS])), min_size=1, max_size=3, unique=True))
    wide = ["cluster.world_size=4"] if choices.get("cluster") == "simulated" else []
    return [*chosen, *wide, *(draw(word_of(key, held.get(key, ""))) for key in keys)]


def some(groups: Words) -> st.SearchStrategy[dict[str, str]]:
    """Return a choice of each of these groups."""
    return st.fixed_dictionaries({group: st.sampled_from(GROUPS[group]) for group in groups})
