"""Whether a run was trained on the data that a configuration names."""

from collections.abc import Mapping
from typing import Any

from experiments.config.schema import DatasetConfig
from experiments.runs.atomic_files import load_json
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
    then = _manifest(folder).get("data_checksums") or {}
    changed = [name for name, checksum in now.items() if checksum not in then.values()]
    return ", ".join(changed) if then else ""


def _manifest(folder: RunFolder) -> dict[str, Any]:
    """Return the manifest of the last attempt that has one."""
    attempts = (path for path in folder.attempts_path.glob("*") if path.name.isdecimal())
    newest_first = sorted(attempts, key=lambda path: int(path.name), reverse=True)
    found = (load_json(path / "manifest.json") for path in [folder.path, *newest_first])
    return next((manifest for manifest in found if manifest), {})
