"""Software and hardware of this machine: versions, backends, GPUs, cores, compilers, kernels."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from experiments.checkup.findings import Finding
from experiments.config.child_environment import num_cores

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


def versions() -> Iterator[Finding]:
    """Python and torch."""
    import torch

    yield Finding(name="python", value=platform.python_version(), note=sys.executable)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Finding(name="torch", value=torch.__version__, note=f"built for {built}")


def packages() -> Iterator[Finding]:
    """Optional packages, and what each is used for."""
    for name, purpose in PACKAGES.items():
        try:
            yield Finding(name=name, value=version(name), note=purpose)
        except PackageNotFoundError:
            yield Finding(name=name, value="not installed", note=purpose, state="absent")


def backends() -> Iterator[Finding]:
    """The backends of torch.distributed."""
    import torch.distributed as dist

    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    notes = {"gloo": "CPU", "nccl": "GPUs", "mpi": "not used: torch's own wheels leave it out"}
    for name, found in there.items():
        yield _there(name, found, notes[name], yes="built in", no="not built in")


def gpus(nproc: int) -> Iterator[Finding]:
    """Names and memory of the GPUs, and whether each of ``nproc`` workers can have its own."""
    import torch

    count = torch.cuda.device_count()
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        yield Finding(name=f"gpu {index}", value=facts.name, note=f"{facts.total_memory / 2**30:.0f} GiB")
    if count >= nproc:
        yield Finding(name="gpus", value=f"{count}", note=f"enough for {nproc} workers: they train there, with nccl")
    else:
        note = f"fewer than {nproc} workers: they train on the CPU, with gloo"
        yield Finding(name="gpus", value=f"{count}", note=note, state="absent")


def cores(nproc: int) -> Iterator[Finding]:
    """Cores that this process may use, and the threads of each rank."""
    usable = num_cores()
    given = os.environ.get("OMP_NUM_THREADS")
    threads = given or str(max(1, usable // nproc))
    source = "OMP_NUM_THREADS" if given else f"{nproc} workers share the cores"
    if usable >= nproc:
        yield Finding(name="cores", value=f"{usable}", note=f"of {os.cpu_count()}")
    else:
        note = f"of {os.cpu_count()}; fewer than {nproc} workers: they take turns"
        yield Finding(name="cores", value=f"{usable}", note=note, state="absent")
    yield Finding(name="threads per rank", value=threads, note=source)


def load() -> Iterator[Finding]:
    """The load of other processes, which disturbs measurements."""
    recent = os.getloadavg()[0]
    busy = recent > BUSY * num_cores()
    note = "other processes are busy: measurements here will be too slow" if busy else "in the last minute"
    yield Finding(name="load", value=f"{recent:.1f}", note=note, state="absent" if busy else "here")


def compilers() -> Iterator[Finding]:
    """The compilers that compile=true needs."""
    import torch

    named = os.environ.get("CXX")
    found = next((path for name in ([named] if named else CXX) if (path := shutil.which(name))), None)
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    missing = [*([] if found else ["a C++ compiler"]), *([] if headers else ["Python's headers"])]
    note = f"needs {' and '.join(missing)}" if missing else f"by {found}"
    yield _there("torch.compile on CPU", not missing, note)
    if torch.cuda.device_count() == 0:
        return
    triton = find_spec("triton") is not None
    yield _there("torch.compile on GPU", triton, "by triton" if triton else "needs triton, which torch for CUDA brings")


def kernels() -> Iterator[Finding]:
    """Whether the selection on a CPU is compiled."""
    import torch

    from micro import kernels

    found = kernels.compiled(torch.ones(1))
    note = "by numba" if found else "pure torch, slower: install numba"
    yield _there("selection kernels", found, note, yes="compiled", no="not compiled")


def _there(name: str, found: bool, note: str, *, yes: str = "works", no: str = "does not work") -> Finding:
    return Finding(name=name, value=yes if found else no, note=note, state="here" if found else "absent")
