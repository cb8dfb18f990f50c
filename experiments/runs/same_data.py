"""Whether a run was trained on the data that a configuration names."""

from collections.abc import Mapping
from typing import Any

from experiments.config.schema import DatasetConfig
from experiments.runs.manifest import manifests_of
from experiments.runs.run_folder import RunFolder

Checksums = Mapping[str, str]  # what is read -> its sha256


def checksums_of(dataset: DatasetConfig) -> Checksums:
    """Return the checksums of the data. Raises: ValueError: it is missing or wrong."""
    import data  # imports torch

    return data.sums(dataset.name, dataset.root, **dataset.settings)


def other_data(folder: RunFolder, now: Checksums) -> str:
    """Return which of the files are not those that a run was trained on; empty where all are, or it is not known.

    Args:
        now: the checksums of the data that it would go on with.
    """
    newest = next((manifest for manifest in reversed(manifests_of(folder)) if manifest), dict[str, Any]())
    then = newest.get("data_checksums") or {}
    changed = [name for name, checksum in now.items() if checksum not in then.values()]
    return ", ".join(changed) if then else ""
