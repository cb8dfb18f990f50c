"""Check out another revision of this code into a temporary folder, with this revision's measuring code."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.config import ROOT
from experiments.config.errors import UserError

TOOLS = Path("experiments/tools")
LIBRARY = TOOLS / "profile/library.py"
EARLIER = Path("experiments/profiles/library.py")  # the location in older revisions
COPIED = [  # files that are copied from the present revision
    TOOLS / "__init__.py",
    *(TOOLS / "profile" / name for name in ("__init__.py", "method_steps.py")),
    *(TOOLS / "ranks" / name for name in ("__init__.py", "worker.py")),
]


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yield a temporary folder with a revision's code, and this revision's `method_steps` to measure it.

    The revision's own `library` runs the steps of its methods.

    Raises:
        UserError: no such revision, or it has no `library`.
    """
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise UserError(f"--against must be a revision of the repository {ROOT}, got '{revision}'")
    with tempfile.TemporaryDirectory(prefix="micro-revision-") as folder:
        tree = Path(folder) / "code"
        if _git("worktree", "add", "--detach", str(tree), commit) is None:
            raise UserError(f"--against {revision}: git cannot check it out into {tree}")
        try:
            _copy_into(tree, revision)
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _copy_into(tree: Path, revision: str) -> None:
    own = next((tree / path for path in (LIBRARY, EARLIER) if (tree / path).exists()), None)
    if own is None:
        raise UserError(f"--against must be a revision with {LIBRARY} or {EARLIER}, {revision} has neither")
    for path in COPIED:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tree / path)
    if own != tree / LIBRARY:
        shutil.copy(own, tree / LIBRARY)


def _git(*words: str) -> str | None:
    """Return git's output for this repository; None if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
