"""Describe how the runs of an ablation differ from its usual settings, as KEY=VALUE."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping

from experiments.config.identity import identity

Config = Mapping[str, object]
OF_METHOD = "sparsifier."
NOT_COMPARED = frozenset({"seed", "sparsifier.name"})


def changes(configs: Mapping[str, Config], plan: Iterable[Config] = ()) -> dict[str, dict[str, str]]:
    """Return, by run, the settings that are not the usual ones, with their values in words.

    Usual is what most forms have; of a method's own parts, what most forms of that method have. Forms are what is left
    when seeds are put together. A key reads as on the command line, without ``sparsifier.`` and ``.name``.

    Args:
        plan: configurations of the whole study: its forms say what is usual, and of those at hand only the methods that
            it has not. So a form has the same name however few are at hand.
    """
    settings = {run: _settings(config) for run, config in configs.items()}
    planned = [_settings(config) for config in plan]
    methods = {found["sparsifier.name"] for found in planned}
    others = [found for found in settings.values() if found["sparsifier.name"] not in methods]
    forms = list({json.dumps(found, sort_keys=True): found for found in [*planned, *others]}.values())
    return {
        run: _unusual(found, _usual(list(settings.values()), found) | _usual(forms, found))
        for run, found in settings.items()
    }


def in_words(changed: Mapping[str, str], *, without: Iterable[str] = ()) -> str:
    """Return the changes of a form in one line, but for those of some keys; empty where there is none."""
    return ", ".join(f"{key}={value}" for key, value in changed.items() if key not in set(without))


def _settings(config: Config) -> dict[str, str]:
    found = {key: str(value) for key, value in identity(config).items() if key != "seed"}
    if found.get("sparsifier.name") == "dense":
        found.pop("density", None)  # it has none
    return found


def _usual(forms: list[dict[str, str]], of: Mapping[str, str]) -> dict[str, str | None]:
    """Return the usual value of each key for forms of the method of ``of``, None for a key that most have not."""
    same = [form for form in forms if form["sparsifier.name"] == of["sparsifier.name"]]
    keys = dict.fromkeys(key for form in forms for key in form)
    counted = {key: Counter(form.get(key) for form in (same if key.startswith(OF_METHOD) else forms)) for key in keys}
    return {key: counts.most_common(1)[0][0] for key, counts in counted.items()}


def _unusual(found: Mapping[str, str], usual: Mapping[str, str | None]) -> dict[str, str]:
    keys = (key for key in found if key not in NOT_COMPARED and found[key] != usual[key])
    named = {key.removeprefix(OF_METHOD).removesuffix(".name"): found[key] for key in keys}
    return dict(sorted(named.items()))
