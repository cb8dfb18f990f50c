"""The boundaries: who may import whom, and who may talk to other ranks. Read from the source, not by running it."""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("micro", "models", "data", "experiments")
LEVELS = (  # the packages of experiments/: each imports from the levels above it in this list; entry points import all
    ("config",),
    ("runs",),
    ("launching", "ranks", "reports"),
    ("tracking",),
    ("training",),
    ("sweeps",),
    ("studies",),
    ("profiles",),
    ("checkup", "benchmarks"),
)
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
OPTIONAL = ("timm", "torchvision", "transformers")  # for models/, where a function that needs one imports it
FRAMEWORKS = {"micro.integrations.lightning": "lightning", "micro.integrations.transformers": "transformers"}
COLLECTIVES = {
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter", "scatter_object_list"),
    *("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"),
}
BELOW_DRIVERS = ("comm", "selectors", "exchanges", "codecs", "density", "feedback", "reducers")
DRIVERS = ("micro.ddp", "micro.fsdp", "micro.local")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Module:
    """A source file by its dotted name."""

    name: str
    source: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.source)))

    @cached_property
    def imported(self) -> set[str]:
        """The dotted names of all imports, wherever in the file; ``from a import b`` gives a and a.b."""
        return set(self._imports(self.nodes))

    def late_imports(self) -> set[str]:
        """Return the imports that happen inside functions alone."""
        inner = {id(node) for outer in self.nodes if isinstance(outer, FUNCTIONS) for node in ast.walk(outer)}
        return self.imported - set(self._imports(node for node in self.nodes if id(node) not in inner))

    def _imports(self, nodes: Iterable[ast.AST]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parents = self.name.split(".")[: -node.level]
        return ".".join([*parents, *([node.module] if node.module else [])])

    def distributed_names(self) -> set[str]:
        """Return what of torch.distributed is used: by attribute of whatever name it has here, or imported from it."""
        names = {"torch.distributed"}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names |= {alias.asname for alias in node.names if alias.asname and alias.name == "torch.distributed"}
            elif isinstance(node, ast.ImportFrom) and node.module == "torch":
                names |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        used = {name.removeprefix("torch.distributed.") for name in self.imported if is_in(name, "torch.distributed")}
        attributes = (node for node in self.nodes if isinstance(node, ast.Attribute))
        return used | {node.attr for node in attributes if written_name(node.value) in names}


def written_name(node: ast.AST) -> str:
    """Return ``a.b`` of a name with attributes; an empty text of any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    outer = written_name(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{outer}.{node.attr}" if outer and isinstance(node, ast.Attribute) else ""


def is_in(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts)


MODULES = [
    Module(dotted(path), path.read_text()) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
]


def crossings(modules: list[Module]) -> list[str]:
    """Return one line for every import or call that crosses a boundary."""
    return [f"{module.name}: {what}" for module in modules for what in sorted(crossed(module))]


def crossed(module: Module) -> Iterator[str]:
    optional = {name for name in module.late_imports() if is_in(module.name, "models") and is_in(name, *OPTIONAL)}
    for name in module.imported - optional:
        if not may_import(module.name, name):
            yield f"imports {name}"
    if module.name not in ("micro.messages", "micro.objects", "micro.group_comm"):
        called = module.distributed_names() & COLLECTIVES
        if is_in(module.name, "experiments"):
            called -= {"barrier"}  # carries nothing that could be counted; benchmarks start their clocks together
        yield from (f"calls {name} of torch.distributed" for name in called)


def may_import(module: str, name: str) -> bool:
    """Tell whether ``module`` may import ``name``, both dotted."""
    if is_in(module, "micro"):
        return micro_may_import(module, name)
    if is_in(module, "models"):
        return is_own_or_standard(name, "models", "torch")
    if is_in(module, "data"):
        return not is_in(name, "torch.distributed", "micro", "models", "experiments", "hydra", "omegaconf", "wandb")
    if is_in(name, "experiments"):
        return experiments_may_import(module, name)
    return not is_in(name, "tests", "notebooks")


def experiments_may_import(module: str, name: str) -> bool:
    """Packages of experiments/ import from lower levels and from themselves; nothing imports an entry point."""
    importer, imported = package_of(module), package_of(name)
    if importer is None or name == "experiments":  # an entry point, or what ``from experiments import NAME`` names too
        return True
    return imported is not None and (imported == importer or LEVEL[imported] < LEVEL[importer])


def package_of(name: str) -> str | None:
    """Return the package of experiments/ in which a dotted name lies, None for an entry point."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else None


def micro_may_import(module: str, name: str) -> bool:
    if is_in(name, "torch.distributed"):
        if module in (
            "micro.group_comm",
            "micro.messages",
            "micro.objects",
            "micro.peer_failures",
            "micro.private_comm",
        ) or is_in(module, "micro.fsdp"):
            return True
        return module in (
            "micro.ddp.attaching",
            "micro.ddp.attachment",
            "micro.ddp.backward",
            "micro.ddp.buckets",
            "micro.ddp.checks",
            "micro.ddp.hook",
            "micro.drivers.attachment",
            "micro.drivers.meeting",
            "micro.drivers.reductions",
            "micro.local.checks",
        )  # types: process groups, and the bucket that DDP gives its hook
    if is_in(module, "micro.integrations"):
        return is_own_or_standard(name, "micro", "torch", FRAMEWORKS.get(module, "micro"))
    if is_in(name, "micro.integrations"):
        return False  # who uses a tool imports its module
    if any(is_in(module, one) and is_in(name, other) for one, other in permutations(DRIVERS, 2)):
        return False  # no driver knows another
    if is_in(module, "micro.drivers", "micro.checkpoints") and is_in(name, *DRIVERS):
        return False  # what drivers share knows no driver
    below = tuple(f"micro.{part}" for part in BELOW_DRIVERS)
    if is_in(module, *below) and is_in(name, *DRIVERS, "micro.drivers", "micro.checkpoints"):
        return False
    if is_in(module, "micro.kernels"):
        return is_own_or_standard(name, "micro.kernels", "micro", "torch", "numpy", "numba", "llvmlite", "triton")
    if is_in(name, "micro.planning") and not is_in(module, "micro.planning", "micro.testing"):
        return False
    if is_in(name, "micro.zoo") and not is_in(module, "micro.zoo", "micro.planning", "micro.testing"):
        return module == "micro.entry_points" and name == "micro.zoo"  # the names of its parts
    if is_in(module, "micro.selectors") and is_in(name, "micro.exchanges"):
        return False
    if is_in(module, "micro.exchanges") and is_in(name, "micro.selectors"):
        return False
    return is_own_or_standard(name, "micro", "torch")


def is_own_or_standard(name: str, *packages: str) -> bool:
    return is_in(name, *packages) or name.split(".")[0] in sys.stdlib_module_names


def test_no_boundary_is_crossed() -> None:
    assert crossings(MODULES) == []


def all_imports(name: str) -> set[str]:
    """Return what importing a module imports in turn, as far as it is of this repository or named there."""
    modules = {module.name: module for module in MODULES}
    found, waiting = set[str](), [name]
    while waiting:
        module = modules.get(waiting.pop())
        new = module.imported - module.late_imports() - found if module else set()
        found |= new
        waiting += new
    return found


def test_tables_need_no_drawing_library() -> None:
    for name in ("experiments.reports.names", "experiments.reports.tables", "experiments.reports.pages"):
        needed = {imported.split(".")[0] for imported in all_imports(name)}
        assert not needed & {"matplotlib", "torch", "hydra"}, name
    assert "matplotlib" in {imported.split(".")[0] for imported in all_imports("experiments.reports.plot_style")}


@pytest.mark.parametrize(
    ("module", "source", "is_crossing"),
    [
        ("micro.selectors.topk", "from ..exchanges import union", True),
        ("micro.ddp.attachment", "import torch.distributed as dist\ndist.all_reduce(x)", True),
        ("micro.ddp.attachment", "import torch.distributed as dist\nx: dist.GradBucket", False),
        ("experiments.config.schema", "def late():\n    from experiments.runs import records", True),
        ("models.mlp", "def late():\n    from transformers import BertConfig", False),
        ("models.mlp", "from transformers import BertConfig", True),
    ],
)
def test_imports_and_calls_are_seen_wherever_they_stand(module: str, source: str, *, is_crossing: bool) -> None:
    assert bool(crossings([Module(module, source)])) is is_crossing
