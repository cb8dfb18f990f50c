"""Read the git revision of the code, and whether the code has uncommitted changes."""

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any


def git_state(folder: Path) -> dict[str, Any]:
    """Return the revision, whether tracked files differ from it, and the SHA-256 of that difference.

    All three are None if ``folder`` is in no repository, there is no commit, or git is missing. The checksum is also
    None if nothing differs.
    """
    revision = _git(folder, "rev-parse", "HEAD")
    difference = _git(folder, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color")
    if revision is None or difference is None:
        return {"revision": None, "dirty": None, "diff_sha256": None}
    return {
        "revision": revision.decode().strip(),
        "dirty": bool(difference),
        "diff_sha256": hashlib.sha256(difference).hexdigest() if difference else None,
    }


def _git(folder: Path, *arguments: str) -> bytes | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # several runs may call git at once
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, env=environment, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
