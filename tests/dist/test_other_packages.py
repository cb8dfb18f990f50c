"""Parts that other packages bring, and what importing micro loads: each in a fresh interpreter."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from experiments.runs.records import read_records
from micro import kernels
from micro.kernels import preparing
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tests" / "packages" / "smallest"
BAD = """
[micro.selectors]
topk = micro_smallest:Smallest
missing = no_such_module:Part
other_name = micro_smallest:Smallest
no_part = json:JSONDecoder
"""


def python(*words: str, path: Path = ROOT) -> str:
    """Return what a fresh interpreter prints that sees the packages in the folder ``path``."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    ran = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def install(folder: Path) -> None:
    """Put the package into a folder as an installer does: its module, its metadata, its entry points."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    parts = [
        "\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in of.items())])
        for group, of in project["entry-points"].items()
    ]
    shutil.copy(PACKAGE / "micro_smallest.py", folder)
    describe(folder, project["name"], project["version"], "\n".join(parts))


def describe(folder: Path, name: str, version: str, entry_points: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


SIMULATE = """
import sys, torch, micro
before = "micro_smallest" in sys.modules
micro.build(micro.Selector, "topk")
still = "micro_smallest" in sys.modules
reducer = micro.SparseReducer(micro.build(micro.Selector, {"name": "smallest", "skip": 1}), density=0.25)
simulation = micro.Simulation(reducer, micro.Layout.flat(8), world_size=2)
step = simulation.step(torch.arange(16.0).view(2, 8), residuals=True)
print(before, still, step.stats[0].counts, step.update.tolist(), "smallest" in micro.known(micro.Selector))
"""


def test_a_selector_of_another_package_is_built_by_name(tmp_path: Path) -> None:
    install(tmp_path)
    printed = python("-c", SIMULATE, path=tmp_path)
    assert printed == "False False (2, 2) [0.0, 5.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0] True"


def test_a_selector_of_another_package_trains_by_the_composed_configuration(tmp_path: Path) -> None:
    install(tmp_path)
    words = ["sparsifier=topk", "sparsifier.selector=smallest", "dataset=synthetic", "model=mlp", "epochs=1"]
    words += ["batch_size=64", "dataset.settings={num_samples: 512, image_size: 8, num_classes: 4}", "density=0.05"]
    words += ["cluster=simulated", "cluster.world_size=2", f"output={tmp_path / 'runs'}"]
    python("-m", "experiments.train", *words, path=tmp_path)
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert folder.name.startswith("mlp-synthetic-smallest-d0.05-")
    assert all(row["local_density"] == pytest.approx(0.05, rel=0.02) for row in read_records(folder / "steps.jsonl"))


LAWS = """
import micro
from micro.testing import check_laws
smallest, pairs, upper = (
    micro.build(kind, name)
    for kind, name in ((micro.Selector, "smallest"), (micro.Exchange, "pairs"), (micro.Codec, "upper"))
)
by_parameter = micro.PerTensor(selector=smallest)
compositions = (
    dict(selector=smallest, exchange=pairs),
    dict(selector=smallest, exchange=pairs, codec=upper),
    dict(selector=micro.Micro(), exchange=pairs, codec=upper),
    dict(selector=smallest, exchange=micro.Union(), codec=upper),
    dict(selector=smallest, exchange=micro.Gather(), codec=upper, indices=micro.Shortest()),
    dict(selector=smallest, exchange=pairs, feedback=micro.MomentumCorrection()),
    dict(selector=by_parameter, exchange=pairs, codec=upper),
)
for parts in compositions:
    check_laws(micro.SparseReducer(density=0.05, **parts), world_sizes=(1, 3))
print("laws hold")
"""


def test_parts_of_another_package_obey_the_laws_with_ours_and_with_each_other(tmp_path: Path) -> None:
    install(tmp_path)
    assert python("-c", LAWS, path=tmp_path) == "laws hold"


REFUSE = """
import micro
for name in ("topk", "missing", "other_name", "no_part", "micro"):
    try:
        print(micro.build(micro.Selector, name))
    except ValueError as error:
        print(error)
"""


def test_a_part_that_cannot_be_used_is_refused_with_its_package(tmp_path: Path) -> None:
    install(tmp_path)
    describe(tmp_path, "bad-parts", "1.0", BAD)
    *refused, works = python("-c", REFUSE, path=tmp_path).splitlines()
    assert works.startswith("Micro(")
    reasons = ("a selector of micro", "ModuleNotFoundError", "'smallest'", "json:JSONDecoder")
    for line, name, why in zip(refused, ("topk", "missing", "other_name", "no_part"), reasons, strict=True):
        assert f"selector '{name}' of package bad-parts" in line
        assert why in line


def test_two_packages_with_one_name_are_refused(tmp_path: Path) -> None:
    install(tmp_path)
    describe(tmp_path, "other-smallest", "1.0", "[micro.selectors]\nsmallest = other:Smallest")
    printed = python("-c", REFUSE, path=tmp_path).splitlines()[0]
    assert all(name in printed for name in ("'smallest'", "micro-smallest", "other-smallest"))


def test_importing_micro_loads_neither_numba_nor_the_planner_and_the_first_kernel_loads_numba() -> None:
    source = (
        "import torch, sys; before = set(sys.modules); from micro import kernels; new = set(sys.modules) - before; "
        "print(new & {'numba', 'llvmlite', 'triton', 'statistics', 'micro.kernels.cpu', 'experiments.planning'}); "
        "kernels.above(torch.ones(3), 0.5); print(kernels.compiled(torch.ones(3)) == ('numba' in sys.modules))"
    )
    assert python("-c", source).splitlines() == ["set()", "True"]


OWN_PRINT = """
import builtins, functools, sys, warnings
import torch
import torch.distributed as dist
warnings.simplefilter("error")
pythons = builtins.print
if sys.argv[1] == "first":
    import micro
def replace_print():
    def print(*values, force=False, **settings):
        if force:
            pythons("own:", *values, **settings)
    builtins.print = print if sys.argv[1] == "first" else functools.partial(print, force=True)
replace_print()
own = builtins.print
import micro
from micro import kernels
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
with micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.5)):
    model(torch.ones(2, 4)).sum().backward()
assert builtins.print is own
print(kernels.has_numba() == ("numba" in sys.modules), force=True)
if sys.argv[1] == "first" and kernels.has_numba():  # numba's own print is Python's
    import numba
    builtins.print = pythons
    numba.njit(lambda: print(3))()
"""


@pytest.mark.parametrize("imported", ["first", "later"])
def test_a_program_that_replaced_print_can_attach_and_keeps_its_own(imported: str) -> None:
    assert python("-c", OWN_PRINT, imported).splitlines()[0] == "own: True"


BROKEN = """
import warnings, torch
from micro import kernels
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    found = [kernels.above(torch.tensor([1.0, 3.0]), 2.0)[0].tolist() for _ in range(2)]
print(found, *[warning.message for warning in heard])
"""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("AttributeError('no print')", ["numba", "AttributeError", "no print"]),
        ("ImportError('needs NumPy 2.3')", ["numba", "NumPy 2.3"]),
        ("ModuleNotFoundError('no numba', name='numba')", []),
    ],
)
def test_where_numba_cannot_be_imported_torch_computes_and_says_so_once(
    error: str, says: list[str], tmp_path: Path
) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(f"raise {error}")
    printed = python("-c", BROKEN, path=tmp_path)
    assert printed.startswith("[[1], [1]]")
    assert all(printed.count(word) == 1 for word in says[1:])
    assert says or printed == "[[1], [1]]"


NOTED = """
import sys, torch
sys.stderr = sys.stdout
from micro.kernels import preparing
preparing.NOTE_S = 0.0
preparing.prepare()
"""


def test_a_start_that_compiles_nothing_says_nothing() -> None:
    preparing.prepare()  # so that all loops are on disk
    assert python("-c", NOTED) == ""


def test_a_loop_that_is_not_on_disk_is_noticed_when_it_is_compiled() -> None:
    numba, seen = pytest.importorskip("numba"), list[int]()
    loop = numba.njit(lambda x: x + 1)
    with kernels.module("jit").when_compiling(lambda: seen.append(1)):
        for _ in range(2):
            assert loop(1) == 2
    assert seen == [1]
