"""Another revision of this code in a folder of its own, with the files that measure on its ranks."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments import profiles, ranks
from experiments.config.errors import UserError
from experiments.config.paths import ROOT

LIBRARY = Path("experiments/profiles/library.py")
COPIED = {  # what that revision takes from this one, by the package in which it is
    profiles: ("__init__.py", "method_steps.py"),
    ranks: ("__init__.py", "worker.py"),
}


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yield a temporary folder with the code of a revision, whose ranks measure by this revision's `method_steps`.

    Steps of its methods are made by its own `library`, or by this revision's where it has none.

    Raises:
        UserError: there is no revision of that name.
    """
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise UserError(f"--against must be a revision of the repository {ROOT}, got '{revision}'")
    with tempfile.TemporaryDirectory(prefix="micro-revision-") as folder:
        tree = Path(folder) / "code"
        if _git("worktree", "add", "--detach", str(tree), commit) is None:
            raise UserError(f"--against {revision}: git cannot check it out into {tree}")
        try:
            _copy_into(tree)
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _copy_into(tree: Path) -> None:
    for package, names in COPIED.items():
        source = Path(str(package.__file__)).parent
        target = tree / source.relative_to(ROOT)
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(source / name, target / name)
    if not (tree / LIBRARY).exists():
        shutil.copy(ROOT / LIBRARY, tree / LIBRARY)


def _git(*words: str) -> str | None:
    """Return what git prints about this repository; None where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
