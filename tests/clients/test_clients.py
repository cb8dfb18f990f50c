"""Programs that others wrote train with `micro` after the changes of recipes.yaml, where MICRO_CLIENTS has checkouts.

MICRO_CLIENTS=DIR: DIR/nanoGPT and DIR/examples are clones that have the revisions of the recipes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import LIMIT_S

RECIPES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text())
CHECKOUTS = os.environ.get("MICRO_CLIENTS")

pytestmark = [pytest.mark.dist, pytest.mark.skipif(not CHECKOUTS, reason="MICRO_CLIENTS names no folder of checkouts")]


def checkout(recipe: dict[str, Any], place: Path) -> Path:
    """Lay out the recipe's revision, changed as it says; return the program's folder."""
    source = Path(str(CHECKOUTS)) / recipe["repository"].split("/")[1]
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", source, place], check=True)
    subprocess.run(["git", "-C", place, "checkout", recipe["revision"], "--", recipe["folder"]], check=True)
    folder = place / recipe["folder"]
    for edit in recipe["edits"] + recipe["without_gpu"]:
        file = folder / edit["file"]
        text = file.read_text()
        assert edit["before"] in text, f"{file.name} has no {edit['before']!r}"
        file.write_text(text.replace(edit["before"], edit["after"]))
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_program_trains(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    folder = checkout(recipe, tmp_path / name)
    if "prepare" in recipe:
        (folder / recipe["text"]).write_text("To be, or not to be, that is the question.\n" * 400)
        subprocess.run([sys.executable, folder / recipe["prepare"]], cwd=folder, check=True, timeout=LIMIT_S)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(recipe.get("ranks", 2))]
    words = [sys.executable, *launch, *recipe["command"].split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(found) for found in re.findall(recipe["losses"], done.stdout)]
    assert losses[-1] < losses[0], losses
