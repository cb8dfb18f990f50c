"""The boundaries: who may import whom, and who may talk to other ranks. Read from the source, not by running it."""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("micro", "models", "data", "experiments")
LEVELS = (  # the packages of experiments/: each imports from the levels above it in this list; entry points import all
    ("planning",),
    ("config",),
    ("runs",),
    ("launching", "reports"),
    ("tracking",),
    ("training",),
    ("sweeps",),
    ("tools.shared", "tools.ranks"),
    ("tools.simulate", "tools.compare", "tools.reproduce", "tools.sparse_adam"),
    ("tools.theory", "tools.profile"),
    ("tools.bench", "tools.doctor"),
)
CORE = tuple(f"experiments.{each}" for each in (
    *("train", "sweep", "figures", "pages", "track"),
    *("config", "runs", "launching", "planning", "training", "sweeps", "tracking", "reports"),
))  # fmt: skip
TOOLS = ("experiments.tools", *(f"experiments.{each}" for each in (
    *("reproduce", "compare", "theory", "simulate", "profile", "doctor", "bench"),
)))  # fmt: skip
LEVEL = {f"experiments.{package}": level for level, packages in enumerate(LEVELS) for package in packages}
OUTSIDE = {  # what a package may import that is not of it, nor of Python; those that are not here: anything
    "micro": "torch",
    "micro.kernels": "torch numpy numba llvmlite triton",
    "micro.patches": "torch safetensors",
    "micro.integrations.lightning": "torch lightning",
    "micro.integrations.transformers": "torch transformers",
    "models": "torch",
}
OPTIONAL = ("timm", "torchvision", "transformers")  # imported inside functions of models/
DRIVERS = ("micro.ddp", "micro.fsdp", "micro.local")
SHARED = ("micro.drivers", "micro.checkpoints")
BELOW_DRIVERS = (
    *("micro.comm", "micro.values", "micro.selectors", "micro.exchanges", "micro.codecs", "micro.density"),
    *("micro.feedback", "micro.reducers"),
)
NEVER = [  # importer, imported, importers of this one that may
    *(("data", name, ()) for name in ("torch.distributed", "micro", "models", "experiments")),
    *(("data", name, ()) for name in ("hydra", "omegaconf", "wandb")),
    *(("experiments", name, ()) for name in ("tests", "notebooks")),
    *((one, other, ()) for one, other in permutations(DRIVERS, 2)),  # no driver knows another
    *((one, other, ()) for one in SHARED for other in DRIVERS),  # what drivers share knows no driver
    *((one, other, ()) for one in BELOW_DRIVERS for other in (*DRIVERS, *SHARED)),
    ("micro.selectors", "micro.exchanges", ()),
    ("micro.exchanges", "micro.selectors", ()),
    ("micro", "micro.integrations", ("micro.integrations",)),
    ("micro", "micro.zoo", ("micro.zoo", "micro.testing", "micro.parts")),
    ("micro", "torch.distributed", (
        *("micro.comm.group", "micro.comm.process_groups", "micro.comm.objects", "micro.comm.peers"),
        *("micro.ddp", "micro.fsdp", "micro.drivers", "micro.local.checks"),  # types, and the groups of a model
    )),
]  # fmt: skip
SENDERS = ("micro.comm.objects", "micro.comm.group")
COLLECTIVES = {
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter", "scatter_object_list"),
    *("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"),
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def is_in(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imports(module: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the dotted names of imports; ``from a import b`` gives a and a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


@cache
def all_and_at_once(module: str, source: str) -> tuple[set[str], set[str]]:
    """Return the imports wherever in the file, and those that importing the module makes."""
    nodes = list(ast.walk(ast.parse(source)))
    inner = {id(node) for outer in nodes if isinstance(outer, FUNCTIONS) for node in ast.walk(outer)}
    return set(imports(module, nodes)), set(imports(module, (node for node in nodes if id(node) not in inner)))


def collectives(source: str) -> set[str]:
    """Return the collectives of torch.distributed that are called, by whatever name that has here."""
    if "distributed" not in source:
        return set()
    nodes = list(ast.walk(ast.parse(source)))
    named = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    bound = {call.rsplit(".", 1)[-1] for call in calls if call.startswith(("dist.", "torch.distributed.", "c10d."))}
    return (named | bound) & COLLECTIVES


def crossed(module: str, source: str) -> Iterator[str]:
    """Yield what crosses a boundary."""
    imported, at_once = all_and_at_once(module, source)
    for name in sorted(
        imported if not is_in(module, "models") else at_once | {n for n in imported if not is_in(n, *OPTIONAL)}
    ):
        if any(is_in(module, who) and is_in(name, whom) and not is_in(module, *but) for who, whom, but in NEVER):
            yield f"imports {name}"
        package = max((each for each in OUTSIDE if is_in(module, each)), key=len, default=None)
        top = name.split(".")[0]
        is_free = package is None or top in (package.split(".")[0], *sys.stdlib_module_names, *OUTSIDE[package].split())
        if not is_free or not goes_down(module, name):
            yield f"imports {name}"
    called = collectives(source) if module not in SENDERS else set()
    if is_in(module, "experiments"):
        called -= {"barrier"}  # carries nothing that could be counted; benchmarks start their clocks together
    yield from (f"calls {name} of torch.distributed" for name in sorted(called))


def goes_down(module: str, name: str) -> bool:
    """Packages of experiments/ import from lower levels and from themselves; nothing imports an entry point."""
    importer, imported = (next((each for each in LEVEL if is_in(dotted, each)), None) for dotted in (module, name))
    if importer is None or not is_in(name, "experiments") or name == "experiments":
        return True
    return imported is not None and (imported == importer or LEVEL[imported] < LEVEL[importer])


def tools_named(module: str, source: str) -> set[str]:
    """Return the tools that a module imports or holds as the name of a module in a string, put together or whole."""
    imported, _ = all_and_at_once(module, source)
    nodes = list(ast.walk(ast.parse(source)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    put_together = {ast.unparse(node) for node in nodes if isinstance(node, ast.JoinedStr)}
    return {name for name in imported | texts if is_in(name, *TOOLS)} | {
        text
        for text in texts | put_together
        if "experiments.tools" in text or text.startswith(("f'experiments.{", 'f"experiments.{'))
    }


@cache
def sources() -> dict[str, str]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in paths}


def test_no_boundary_is_crossed() -> None:
    assert [f"{module}: {what}" for module, source in sources().items() for what in crossed(module, source)] == []


def test_the_core_knows_no_tool() -> None:
    core = {module: source for module, source in sources().items() if is_in(module, *CORE)}
    assert {module.split(".")[1] for module in core} == {each.split(".")[1] for each in CORE}
    assert {module: named for module, source in core.items() if (named := tools_named(module, source))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from experiments.tools.shared import methods",
        "from experiments import compare",
        'import_module("experiments.doctor")',
        'import_module("experiments.tools.bench")',
        'import_module(f"experiments.{name}")',
    ],
)
def test_a_tool_in_the_core_is_found(line: str) -> None:
    assert tools_named("experiments.train", line)
    assert not tools_named("experiments.train", '"measure it with `python -m experiments.profile`"')


def open_withs(source: str) -> set[str]:
    """Return the generators, but for context managers, that hold a ``with`` open where they yield."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    plain = [each for each in functions if "contextmanager" not in map(ast.unparse, each.decorator_list)]
    return {each.name for each in plain for inside in own_nodes(each) if isinstance(inside, ast.With)
            for node in own_nodes(inside) if isinstance(node, ast.Yield | ast.YieldFrom)}  # fmt: skip


def own_nodes(outer: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in a node, but not in functions in it."""
    for node in ast.iter_child_nodes(outer):
        if not isinstance(node, FUNCTIONS):
            yield node
            yield from own_nodes(node)


def test_no_reduction_holds_a_with_open_while_others_run() -> None:
    """What a ``with`` sets, such as a stream or a thread's number, would hold for whatever runs meanwhile."""
    held = {name: found for name, source in sources().items() if is_in(name, "micro") and (found := open_withs(source))}
    assert held == {}
    assert open_withs("def held():\n    with one:\n        if two:\n            three = yield") == {"held"}
