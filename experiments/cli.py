"""The command ``micro-train``: experiments.train under a name that a shell can complete.

    micro-train sparsifier=topk density=0.01
    eval "$(micro-train -sc install=bash)"        # then TAB completes groups, their choices and keys; also fish, zsh

It belongs to an editable install of the repository, whose conf/ it reads; runs go to the folder it is called from.
"""

import re
import sys

import hydra
from hydra.core.config_store import ConfigStore
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import DictConfig

from experiments.config.overrides import TOOLS
from experiments.config.paths import CONF


def main() -> None:
    """Train, or complete a word for the shell."""
    if {"-sc", "--shell-completion"} & set(sys.argv[1:]):
        _complete()
        return
    from experiments.train import main as train  # here: it imports torch, and a shell waits for its answer

    train()


def _complete() -> None:
    ConfigStore.instance().store(name="schema", node={})  # the files alone say which words there are
    _offer_settings_alone()
    _answer()


def _offer_settings_alone() -> None:
    """Leave the groups that set no training out of what Hydra offers: it lists every folder of conf/."""
    query = CompletionPlugin._query_config_groups

    def settings_alone(
        self: CompletionPlugin, word: str, config_name: str | None, words: list[str]
    ) -> tuple[list[str], bool]:
        offered, exact = query(self, word, config_name, words)
        return [name for name in offered if re.split("[=/]", name.lstrip("+~"))[0] not in TOOLS], exact

    CompletionPlugin._query_config_groups = settings_alone  # type: ignore[method-assign]


@hydra.main(config_path=str(CONF), config_name="train", version_base="1.3")
def _answer(_composed: DictConfig) -> None:
    """Do nothing: hydra answers the shell before it comes here."""
