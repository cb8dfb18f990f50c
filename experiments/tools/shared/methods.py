"""Build the methods of conf/sparsifier by name, as training does."""

from collections.abc import Sequence

import micro
from experiments.config.builders import build_reducer
from experiments.config.compose import compose_runs
from experiments.config.conf_files import check_name, choices_of
from experiments.config.method_names import words_of


def known_methods() -> list[str]:
    """Return the names of conf/sparsifier."""
    return choices_of("sparsifier")


def select_names(given: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """Return the given names without duplicates; all known names if none is given.

    Raises:
        UserError: a name is unknown.
    """
    for name in given:
        check_name("sparsifier", known, name.split("+")[0], what)
    return list(dict.fromkeys(given)) or list(known)


def build_methods(names: Sequence[str], density: float) -> dict[str, micro.Reducer]:
    """Return the reducer of each method, as training builds it from its yaml.

    The optimizer has no momentum, because methods with momentum correction refuse it.

    Raises:
        UserError: a density outside (0, 1], or an invalid yaml.
    """
    configs = compose_runs([[*words_of(name), f"density={density!r}", "optimizer.momentum=0"] for name in names])
    return {name: build_reducer(config) for name, config in zip(names, configs, strict=True)}
