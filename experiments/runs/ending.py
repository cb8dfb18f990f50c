"""DONE, the last file of a run: it says what the others hold, so that what is missing later is found."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from experiments.runs.atomic_files import Damaged, Digest, digest_of, load_json, to_json, write_json
from experiments.runs.disks import reason
from experiments.runs.run_folder import RunFolder

_KEY = "sha256"  # of all else in DONE


def write_done(folder: RunFolder, summary: Mapping[str, Any], records: Mapping[str, Digest]) -> None:
    """Mark a run as done.

    Args:
        summary: what to keep of its end.
        records: what was recorded, by the name of the file.

    Raises:
        Damaged: a file was removed or changed while the run went on.
        CannotWrite: DONE cannot be written.
        FolderLost: this process no longer owns the folder.
    """
    folder.check_owned()
    for name, digest in records.items():
        digest.check(folder.path / name)
    files = dict(records)
    for path in (folder.config_path, folder.manifest_path):
        try:
            files[path.name] = digest_of(path)
        except OSError as error:
            raise Damaged(f"{path} is not there at the end of the run: {reason(error)}") from None
    content = {**summary, "files": {name: digest._asdict() for name, digest in files.items()}}
    plain = json.loads(to_json(content))
    write_json(folder.done_path, {**plain, _KEY: _sha256(plain)})


def check_done(folder: RunFolder) -> None:
    """Check that a finished run is whole. Raises: Damaged."""
    done = load_json(folder.done_path)
    if done.pop(_KEY, None) != _sha256(done):
        raise Damaged(f"{folder.done_path} is not as it was written")
    for name, digest in done["files"].items():
        Digest(**digest).check(folder.path / name)


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
