"""The environment of a run: the scheduler, the key of the tracking server, disks, data sets."""

import netrc
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from experiments.checkup.findings import Finding

FOLDERS = (Path("results"), Path("data/cache"))
DATA_ROOT = Path("data/cache")
SERVER = "https://api.wandb.ai"
TIMEOUT_S = 3
SCARCE_BYTES = 5e9  # a data set and its archive, or a long study's checkpoints


def slurm() -> Iterator[Finding]:
    """Whether jobs can be submitted from here, and whether the controller answers."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        yield Finding(name="slurm", value="not here", note="sbatch and scontrol are not on the PATH", state="absent")
        return
    done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=TIMEOUT_S)
    answer = next(iter((done.stdout + done.stderr).strip().splitlines()[-1:]), "no answer")
    if done.returncode or "UP" not in answer:
        yield Finding(name="slurm", value="installed, not answering", note=answer, state="absent")
        return
    yield Finding(name="slurm", value="answers", note=answer)


def wandb() -> Iterator[Finding]:
    """Whether records can be mirrored; a key is only reported to exist."""
    if find_spec("wandb") is None:
        yield Finding(name="wandb", value="not installed", note="records stay in the run folders", state="absent")
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", SERVER)).hostname or ""
    yield Finding(name="wandb", value="installed")
    if _has_key(host):
        yield Finding(name="wandb key", value="yes", note=f"for {host}")
        return
    yield Finding(
        name="wandb key", value="no", note=f"none for {host}: offline works; online needs wandb login", state="absent"
    )


def _has_key(host: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    home = Path.home()
    places = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [home / ".netrc", home / "_netrc"]
    for place in places:
        with suppress(OSError, netrc.NetrcParseError):
            if host in netrc.netrc(place).hosts:
                return True
    return False


def disks() -> Iterator[Finding]:
    """Free space where runs and data sets are written."""
    for folder in FOLDERS:
        at = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
        free = shutil.disk_usage(at).free
        if not os.access(at, os.W_OK):
            yield Finding(name=f"{folder}/", value="not writable", note=f"{at} belongs to another user", state="absent")
            continue
        note = "" if free >= SCARCE_BYTES else "little for data sets and checkpoints"
        yield Finding(
            name=f"{folder}/",
            value=f"{free / 1e9:.1f} GB free",
            note=note,
            state="here" if free >= SCARCE_BYTES else "absent",
            data={"free_bytes": free},
        )


def datasets() -> Iterator[Finding]:
    """Data sets that were prepared; their files are checked by `data.prepare` and by a run, not here."""
    from data import imagenet
    from data.catalogue import CATALOGUE

    folders = {name: entry.folder for name, entry in CATALOGUE.items()} | {imagenet.FOLDER: imagenet.FOLDER}
    found = [name for name, folder in folders.items() if (DATA_ROOT / folder).is_dir()]
    if found:
        yield Finding(name="data sets", value=", ".join(found), note=f"in {DATA_ROOT}/, beside those without files")
        return
    note = f"none in {DATA_ROOT}/: python -m data.prepare --list; digits, latent, manuals, synthetic need none"
    yield Finding(name="data sets", value="none prepared", note=note, state="absent")
