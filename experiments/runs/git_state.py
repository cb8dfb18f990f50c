"""Read the git revision of the code and uncommitted changes, and find runs of other code."""

import hashlib
import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.config.paths import ROOT
from experiments.runs.files import load_json
from experiments.runs.run_folder import RunFolder

CODE = ("conf", "data", "experiments", "micro", "models")  # folders whose files change what a run computes


def git_state(folder: Path) -> dict[str, Any]:
    """Return the revision, whether the code differs from it, and the SHA-256 of that difference.

    Tracked files count, and files of `CODE` that git does not know and does not ignore. All three are None if
    ``folder`` is in no repository, there is no commit, or git is missing. The checksum is also None if nothing differs.
    """
    try:
        revision = _git(folder, "rev-parse", "HEAD").decode().strip()
        difference = _git(folder, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color") + _untracked(folder)
    except (OSError, subprocess.SubprocessError):
        return {"revision": None, "dirty": None, "diff_sha256": None}
    checksum = hashlib.sha256(difference).hexdigest() if difference else None
    return {"revision": revision, "dirty": bool(difference), "diff_sha256": checksum}


def other_code(finished: Sequence[RunFolder]) -> str:
    """Return a line if some finished runs were made by other code than the present one, else an empty one."""
    here = _name(git_state(ROOT)) if finished else ""
    names = [_name(load_json(folder.manifest_path).get("git")) for folder in finished]
    others = Counter(name for name in names if name and name != here)
    if not others or not here:
        return ""
    made = ", ".join(f"{name} ({number})" for name, number in others.most_common())
    return f"{others.total()} of {len(finished)} finished runs are of other code: {made}; the code here is {here}"


def _untracked(folder: Path) -> bytes:
    """Return a line for each file of `CODE` that git does not know: its name, and the SHA-256 of its content."""
    names = _git(folder, "ls-files", "--others", "--exclude-standard", "-z", "--", *CODE).split(b"\0")
    lines = []
    for name in filter(None, names):
        with suppress(OSError):  # gone since, or a link to nothing
            content = (folder / os.fsdecode(name)).read_bytes()
            lines.append(name + b" " + hashlib.sha256(content).hexdigest().encode() + b"\n")
    return b"".join(lines)


def _name(git: Any) -> str:
    """Return how a state of the code is called; empty where it is not known."""
    if not isinstance(git, Mapping) or not git.get("revision"):
        return ""
    changes = str(git.get("diff_sha256") or "")
    return str(git["revision"])[:8] + (f" with changes {changes[:6]}" if changes else "")


def _git(folder: Path, *arguments: str) -> bytes:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # several runs may call git at once
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, env=environment, timeout=30, check=True).stdout
