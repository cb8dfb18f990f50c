"""Compile Triton's kernels ahead of time for other GPUs, and check the compiler's output."""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.tools.bench.tables import Column, Columns
from experiments.tools.ranks.measures import Row

ARCHITECTURES = (80, 90, 100)  # A100, H100, B200
WARP = 32  # threads of a warp
VECTOR = re.compile(r"\b(ld|st)\.global[.\w:]*\.(?:v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]16|b128)\b")  # 16 bytes
COLUMNS: Columns = {
    "kernel": Column("kernel"),
    "dtypes": Column("dtypes"),
    "GPU": Column("gpu"),
    "registers": Column("registers", "{:.0f}"),
    "spilled bytes": Column("spilled", "{:.0f}"),
    "shared bytes": Column("shared", "{:.0f}"),
    "16-byte loads": Column("loads", "{:.0f}"),
    "16-byte stores": Column("stores", "{:.0f}"),
    "bytes per element": Column("traffic"),
    "problem": Column("problem"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with certain dtypes.

    Attributes:
        kernel: its name in the table.
        function: the kernel.
        types: the run-time arguments as NAME:TYPE with Triton's types, separated by spaces.
        constants: the compile-time arguments.
        traffic: bytes moved, as a text; per element of the vector unless stated otherwise.
        dtypes: of its main vectors, as a text.
        stores: whether it writes whole vectors, 16 bytes at a time; it always reads so.
        in_place: whether it writes memory that it has read.
    """

    kernel: str
    function: Any
    types: str
    constants: dict[str, Any]
    traffic: str
    dtypes: str = "float32"
    stores: bool = False
    in_place: bool = False


def compiled(variants: Iterable[Variant]) -> Iterator[Row]:
    """Yield the compiler's output of each variant for each architecture; needs no GPU."""
    for variant in variants:
        for architecture in ARCHITECTURES:
            yield compile_for(variant, architecture)


def compile_for(variant: Variant, architecture: int) -> Row:
    """Compile a variant for GPUs of an architecture, as if addresses and lengths were multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, given = variant.function.arg_names, dict(word.split(":") for word in variant.types.split())
    types = {name: given.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types[name].startswith("*") or name == "numel"
    }
    source = ASTSource(variant.function, types, variant.constants, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    binary = triton.compile(source, target=GPUTarget("cuda", architecture, WARP), options=options)
    wide = VECTOR.findall(binary.asm["ptx"])
    usage = _resource_usage(binary.asm["cubin"])
    spilled, loads, stores = usage["STACK"] + usage["LOCAL"], wide.count("ld"), wide.count("st")
    problems = {
        "spills registers": spilled,
        "moves less than 16 bytes at a time": not loads or (variant.stores and not stores),
        "may write what another warp has still to read": variant.in_place and not _reads_first(binary.asm["ptx"]),
    }
    return {
        "kernel": variant.kernel,
        "dtypes": variant.dtypes,
        "gpu": f"sm_{architecture}",
        "registers": usage["REG"],  # per thread, like the next
        "spilled": spilled,
        "shared": binary.metadata.shared,  # per block of threads
        "loads": loads,
        "stores": stores,
        "traffic": variant.traffic,
        "problem": ", ".join(problem for problem, is_there in problems.items() if is_there),
    }


def _reads_first(ptx: str) -> bool:
    """Return whether a barrier of all warps separates the last read of global memory from the first write."""
    return "bar.sync" in ptx[ptx.rindex("ld.global") : ptx.index("st.global")]


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return registers, bytes of stack and so on of a binary, from NVIDIA's cuobjdump, which Triton includes."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
