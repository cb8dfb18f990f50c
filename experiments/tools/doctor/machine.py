"""Check the machine: versions, cores, GPUs, compilers, SLURM, W&B, disks, data sets."""

import netrc
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from experiments.launching.rank_environment import num_cores
from experiments.tools.doctor.findings import Finding, either

PACKAGES = {
    "hydra-core": "configuration: train and sweep",
    "rich": "progress and tables on a terminal",
    "pandas": "records to tables",
    "matplotlib": "figures",
    "numba": "compiled selection on a CPU",
    "scikit-learn": "the digits images",
    "torchvision": "VGG's layers",
    "pillow": "decoding ImageNet, once",
    "timm": "Inception-v4",
    "transformers": "BERT",
    "wandb": "mirror of records to Weights & Biases",
    "submitit": "hydra's launcher for SLURM",
    "nbclient": "running the notebooks",
}
BUSY = 0.5  # load per core above which a measurement is not reliable
CXX = ("g++", "clang++", "c++")
DATA_ROOT = Path("data/cache")
FOLDERS = (Path("results"), DATA_ROOT)
SCARCE_BYTES = 5e9  # a data set with its archive, or a long study's checkpoints


def versions() -> Iterator[Finding]:
    """Python, torch, and optional packages with their uses."""
    import torch

    yield Finding("python", platform.python_version(), sys.executable)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Finding("torch", torch.__version__, f"built for {built}")
    for name, purpose in PACKAGES.items():
        try:
            yield Finding(name, version(name), purpose)
        except PackageNotFoundError:
            yield Finding(name, "not installed", purpose, "absent")


def cores(nproc: int) -> Iterator[Finding]:
    """Cores available to this process, threads per rank, and the load of other processes."""
    usable, given = num_cores(), os.environ.get("OMP_NUM_THREADS")
    turns = "" if usable >= nproc else f"; fewer than {nproc} workers: they take turns"
    yield either("cores", usable >= nproc, f"{usable}", f"of {os.cpu_count()}{turns}")
    source = "OMP_NUM_THREADS" if given else f"{nproc} workers share the cores"
    yield Finding("threads per rank", given or str(max(1, usable // nproc)), source)
    recent = os.getloadavg()[0]
    is_idle = recent <= BUSY * usable
    note = "in the last minute" if is_idle else "other processes are busy: measurements here will be too slow"
    yield either("load", is_idle, f"{recent:.1f}", note)


def gpus(nproc: int) -> Iterator[Finding]:
    """GPUs, whether each of ``nproc`` workers can have its own, and the backends of torch.distributed."""
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        yield Finding(f"gpu {index}", facts.name, f"{facts.total_memory / 2**30:.0f} GiB")
    enough = f"enough for {nproc} workers: they train there, with nccl"
    fewer = f"fewer than {nproc} workers: they train on the CPU, with gloo"
    yield either("gpus", count >= nproc, f"{count}", enough if count >= nproc else fewer)
    for name, found, use in (("gloo", dist.is_gloo_available(), "CPU"), ("nccl", dist.is_nccl_available(), "GPUs")):
        yield either(name, found, "built in" if found else "not built in", use)


def compilers() -> Iterator[Finding]:
    """Requirements of compile=true, and whether CPU selection is compiled."""
    import torch

    from micro import kernels

    named = os.environ.get("CXX")
    found = next(filter(None, map(shutil.which, [named] if named else CXX)), None)
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    missing = [*([] if found else ["a C++ compiler"]), *([] if headers else ["Python's headers"])]
    note = f"needs {' and '.join(missing)}" if missing else f"by {found}"
    yield either("torch.compile on CPU", not missing, "does not work" if missing else "works", note)
    if torch.cuda.device_count():
        triton = find_spec("triton") is not None
        note = "by triton" if triton else "needs triton, which torch for CUDA brings"
        yield either("torch.compile on GPU", triton, "works" if triton else "does not work", note)
    compiled = kernels.compiled(torch.ones(1))
    note = "by numba" if compiled else "pure torch, slower: install numba"
    yield either("selection kernels", compiled, "compiled" if compiled else "not compiled", note)


def slurm() -> Iterator[Finding]:
    """Whether jobs can be submitted from here, and whether the controller answers."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        yield Finding("slurm", "not here", "sbatch and scontrol are not on the PATH", "absent")
        return
    done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=3)
    answer = next(iter((done.stdout + done.stderr).strip().splitlines()[-1:]), "no answer")
    is_up = not done.returncode and "UP" in answer
    yield either("slurm", is_up, "answers" if is_up else "installed, not answering", answer)


def wandb() -> Iterator[Finding]:
    """Whether records can be mirrored; a key is only reported to exist."""
    if find_spec("wandb") is None:
        yield Finding("wandb", "not installed", "records stay in the run folders", "absent")
        return
    yield Finding("wandb", "installed")
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    with suppress(OSError, netrc.NetrcParseError):
        has_key |= host in netrc.netrc(os.environ.get("NETRC")).hosts
    note = f"for {host}" if has_key else f"none for {host}: offline works; online needs wandb login"
    yield either("wandb key", has_key, "yes" if has_key else "no", note)


def disks() -> Iterator[Finding]:
    """Free space where runs and data sets are written."""
    for folder in FOLDERS:
        at = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
        free = shutil.disk_usage(at).free
        if not os.access(at, os.W_OK):
            yield Finding(f"{folder}/", "not writable", f"{at} belongs to another user", "absent")
            continue
        is_enough = free >= SCARCE_BYTES
        note = "" if is_enough else "little for data sets and checkpoints"
        yield either(f"{folder}/", is_enough, f"{free / 1e9:.1f} GB free", note, free_bytes=free)


def datasets() -> Iterator[Finding]:
    """Prepared data sets; their files are checked by `data.prepare` and by runs, not here."""
    from data import imagenet
    from data.catalogue import CATALOGUE

    folders = {name: entry.folder for name, entry in CATALOGUE.items()} | {imagenet.FOLDER: imagenet.FOLDER}
    found = [name for name, folder in folders.items() if (DATA_ROOT / folder).is_dir()]
    none = f"none in {DATA_ROOT}/: python -m data.prepare --list; digits, latent, manuals, synthetic need none"
    note = f"in {DATA_ROOT}/, beside those without files" if found else none
    yield either("data sets", bool(found), ", ".join(found) or "none prepared", note)
