"""What a run of two nodes must end with: the weights of the same run, simulated in this process."""

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.runs.run_folder import RunFolder, folder_of
from experiments.training.preflight import prepare_runs
from experiments.training.runner import execute


def undisturbed(words: Sequence[str], path: Path) -> RunFolder:
    """Carry out a run on two simulated ranks, which nothing stops; return its folder, in ``path``."""
    (config,) = prepare_runs([[*words, "cluster=simulated", "cluster.world_size=2", f"output={path / 'simulated'}"]])
    execute(config)
    return folder_of(config)


def digest_of(folder: RunFolder) -> str:
    return str(json.loads(folder.done_path.read_text())["weights_sha256"])
