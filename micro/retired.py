"""Error messages for removed public names, parts and settings: each names the replacement."""

import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES: dict[str, str] = {
    "micro.Scaled": "use micro.build(micro.Selector, {'name': 'scaled_elements', 'selector': ...})",
    "micro.zoo.accordion": "use micro.ByName, which sets the density by the names of parameters",
    "micro.zoo.natural": "use micro.Int8",
    "micro.zoo.onebit": "use micro.Sign",
    "micro.suggest": "read docs/choosing.md, or run python -m experiments.doctor, which predicts steps",
    "micro.planning": "use experiments.planning; volume_of and calls_of are in micro.predicted_traffic",
    "micro.integrations.wandb": "call run.log(step.numbers()) in on_step, see docs/watching.md",
    "micro.integrations.tensorboard": "call writer.add_scalar in on_step, see docs/watching.md",
    "micro.integrations.on_step": "give micro.attach a function, on_step=",
    "micro.EF21": "use micro.ErrorFeedback",
    "micro.fsdp.WithinAttachment": "give micro.fsdp.attach_within a codec, which needs no state",
    "micro.reducers.scattered": "give micro.fsdp.attach_within a codec",
    "micro.exchanges.in_pieces": "use micro.Union or micro.Gather",
}
"""Dotted names that could be imported."""

PARTS: dict[str, tuple[str, str]] = {
    "scaled": ("selector", "use scaled_elements"),
    "accordion": ("density", "use by_name, or TopK(scope='layer')"),
    "sage": ("fit", "use gaussiank"),
    "sage_published": ("fit", "use gaussiank_published"),
    "redsync": ("fit", "use gaussiank"),
    "redsync_published": ("fit", "use gaussiank_published"),
    "sidco_published": ("fit", "use sidco"),
    "natural": ("codec", "use int8"),
    "onebit": ("codec", "use sign"),
    "dear": ("schedule", "use exact"),
    "asc": ("schedule", "use mgwfbp"),
    "omgs": ("schedule", "use sparse_exact"),
    "capped": ("schedule", "use ddp"),
    "ef21": ("feedback", "use residual"),
    "in_pieces": ("exchange", "use its inner exchange, union or gather"),
}
"""Removed parts by name: their kind and the replacement."""

SETTINGS: dict[tuple[str, str], str] = {
    ("micro", "slack"): "leave it out, indices travel by themselves",
    ("micro", "block"): "leave it out, or use scaled_elements",
    ("micro", "rule=repaired"): "use rule agreed",
}
"""Removed settings of existing parts, and removed values of ``rule`` as ``rule=NAME``."""


def refusal_of_name(name: str) -> str | None:
    """Return the error message for a removed dotted name, None for any other name."""
    return f"{name} is no longer in micro: {NAMES[name]}" if name in NAMES else None


def refusal_of_part(kind: str, name: str) -> str | None:
    """Return the error message for a removed part of a kind, None for any other part."""
    gone, successor = PARTS.get(name, ("", ""))
    return f"{kind} '{name}' is no longer in micro: {successor}" if gone == kind else None


def refusal_of_setting(part: str, setting: str) -> str | None:
    """Return the error message for a removed setting of a part, None for any other setting."""
    successor = SETTINGS.get((part, setting))
    return f"{setting} of {part} is no longer in micro: {successor}" if successor else None


def refusal_of_state(description: Any) -> str | None:
    """Return the error message for a saved state whose method has a removed part or setting, None for any other.

    ``description`` is of micro.checkpoints.description; in older states it is only the method's name.
    """
    lines = _refusals_in_text(description) if isinstance(description, str) else _refusals_in_description(description)
    line = next(lines, None)
    return f"state was saved with a removed part or setting: {line}" if line else None


def _refusals_in_text(method: str) -> Iterator[str]:
    name, _, rule = method.partition(" (")
    lines = [refusal_of_part(PARTS[word][0], word) for word in name.split() if word in PARTS]
    lines.append(refusal_of_setting(name, f"rule={rule.removesuffix(')')}"))
    yield from filter(None, lines)


def _refusals_in_description(description: Any) -> Iterator[str]:
    if isinstance(description, list):
        for each in description:
            yield from _refusals_in_description(each)
    if not isinstance(description, Mapping):
        return
    name, settings = str(description.get("name")), description.get("settings")
    if name in PARTS:
        yield f"{refusal_of_part(PARTS[name][0], name)}"
    given = settings if isinstance(settings, Mapping) else {}
    for key, value in given.items():
        words = () if value is None else (key, f"{key}={value}")
        yield from filter(None, (refusal_of_setting(name, word) for word in words))
    for each in description.values():
        yield from _refusals_in_description(each)


class Finder:
    """An import finder that refuses removed modules. It is last in the list, so other imports never reach it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Raise ImportError for a removed name."""
        line = refusal_of_name(name)
        if line:
            raise ImportError(line, name=name)
        return None


def refuse_imports() -> None:
    """Install Finder, which the import system asks about modules that no other finder knows."""
    if Finder not in sys.meta_path:
        sys.meta_path.append(Finder)
