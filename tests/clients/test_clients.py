"""Programs that others wrote train with `micro` after the changes of recipes.yaml, where MICRO_CLIENTS has checkouts.

MICRO_CLIENTS=DIR: DIR/nanoGPT, DIR/examples, DIR/pytorch-image-models, DIR/accelerate are clones that have the
revisions of the recipes. What is not there is skipped.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import LIMIT_S

RECIPES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text())
ROOT = Path(__file__).parents[2]
CHECKOUTS = os.environ.get("MICRO_CLIENTS")

pytestmark = [pytest.mark.dist, pytest.mark.skipif(not CHECKOUTS, reason="MICRO_CLIENTS names no folder of checkouts")]


def checkout(recipe: dict[str, Any], place: Path) -> Path:
    """Lay out the recipe's revision, changed as it says; return the program's folder."""
    source = Path(str(CHECKOUTS)) / recipe["repository"].split("/")[1]
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", source, place], check=True)
    files = recipe.get("files", recipe["folder"])
    subprocess.run(["git", "-C", place, "checkout", recipe["revision"], "--", files], check=True)
    folder = place / recipe["folder"]
    if "patch" in recipe:
        subprocess.run(["git", "-C", folder, "apply", ROOT / recipe["patch"]], check=True)
    for edit in recipe.get("edits", []) + recipe["without_gpu"]:
        file = folder / edit["file"]
        text = file.read_text()
        assert edit["before"] in text, f"{file.name} has no {edit['before']!r}"
        file.write_text(text.replace(edit["before"], edit["after"]))
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_program_trains(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    needed = [recipe["repository"].split("/")[1], *recipe.get("imports", "").split()]
    if missing := [part for part in needed if not (Path(str(CHECKOUTS)) / part).is_dir()]:
        pytest.skip(f"MICRO_CLIENTS has no {missing[0]}")
    folder = checkout(recipe, tmp_path / name)
    if "prepare" in recipe:
        subprocess.run([sys.executable, "-c", recipe["prepare"]], cwd=folder, check=True, timeout=LIMIT_S)
    ranks = str(recipe.get("ranks", 2))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    words = [sys.executable, *(torchrun if recipe.get("launch") != "python" else []), *shlex.split(recipe["command"])]
    paths = [ROOT, *(Path(str(CHECKOUTS)) / part for part in needed[1:])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    losses = [float(found) for found in re.findall(recipe["losses"], output)]
    assert min(losses[-4:]) < losses[0], losses
