"""Triton's kernels compiled ahead of time, for GPUs that are not there: what the compiler says about them."""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90, 100)  # A100, H100, B200
WARP = 32  # threads
VECTOR = re.compile(r"\b(ld|st)\.global[.\w:]*\.(?:v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]16|b128)\b")  # 16 bytes


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for certain dtypes.

    Attributes:
        kernel: its name in the table.
        dtypes: of its main vectors, in words.
        function: the kernel.
        types: Triton's types of its arguments that are not known when it is compiled.
        constants: the arguments that are.
        traffic: bytes that it moves, in words: per element of the vector, where nothing else is said.
        element_bytes: the part of them that grows with the vector.
        loads, stores: whether whole vectors are read and written, 16 bytes at a time.
    """

    kernel: str
    dtypes: str
    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    traffic: str
    element_bytes: float
    loads: bool = True
    stores: bool = False
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of a variant for one architecture."""

    kernel: str
    dtypes: str
    architecture: int
    registers: int  # of a thread
    spilled_bytes: int  # of a thread
    shared_bytes: int  # of a block of threads
    vector_loads: int  # instructions that read 16 bytes
    vector_stores: int
    wants_loads: bool = field(repr=False, default=True)
    wants_stores: bool = field(repr=False, default=False)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is spilled and whole vectors move 16 bytes at a time."""
        narrow = (self.wants_loads and not self.vector_loads) or (self.wants_stores and not self.vector_stores)
        return not self.spilled_bytes and not narrow


def variants() -> list[Variant]:
    """Return every kernel with the dtypes that it mostly meets."""
    from micro.kernels.candidates import NUM_BINS
    from micro.kernels.triton import absorbing, scanning, scattering, summing
    from micro.kernels.triton.launching import ALIGNED, BLOCK

    blocks = {"ALIGNED": ALIGNED, "BLOCK": BLOCK}
    limited = {**blocks, "LIMIT": 2.0**100}
    absorbed = {"residual": "*fp32", "grad": "*fp32", "first_bad": "*i32", "numel": "i32"}
    counted = {"plan": "*i32", "counts": "*i32", "bins": "*i32"}
    placed = {"residual": "*fp32", "plan": "*i32", "ends": "*i32", "numel": "i32", "capacity": "i32"}
    lists = {"indices": "*i32", "values": "*fp32"}
    scanned = {"x": "*fp32", "threshold": "*fp32", "numel": "i32"}
    binned = {"x": "*fp32", "bins": "*i32", "first": "i32", "shift": "i32", "num_bins": "i32", "numel": "i32"}
    scattered = {"vector": "*fp32", "indices": "*i32", "values": "*fp32", "numel": "i32", "count": "i32"}
    found = {"indices": "*i32", "magnitudes": "*fp32"}
    summed = {"partials": "*fp64", "numel": "i32"}
    return [
        Variant("absorb", "float32", absorbing.absorb_kernel, absorbed, limited, "16", 16, stores=True),
        Variant(
            *("absorb", "bfloat16 into float32", absorbing.absorb_kernel, absorbed | {"grad": "*bf16"}, limited),
            *("12", 12),
            stores=True,
        ),
        Variant(
            *("absorb and count", "float32", absorbing.absorb_and_count_kernel, absorbed | counted),
            *(limited | {"NUM_BINS": NUM_BINS}, "16", 16),
            stores=True,
        ),
        Variant(
            *("place candidates", "float32", absorbing.place_kernel, placed | lists, blocks),
            *("4 in the slice, where a block holds any, and 8 for each", 4),
        ),
        Variant("count above", "float32", scanning.count_kernel, scanned | {"counts": "*i32"}, blocks, "4", 4),
        Variant(
            *("put above", "float32", scanning.put_kernel, scanned | {"ends": "*i32", "room": "i32"} | found, blocks),
            *("4 where a block holds any, and 8 for each", 4),
        ),
        Variant(
            "count by magnitude", "float32", scanning.histogram_kernel, binned, blocks | {"NUM_BINS": 2048}, "4", 4
        ),
        Variant("scatter", "float32", scattering.scatter_kernel, scattered, blocks, "16 for each index", 0),
        Variant("sums", "float32", summing.sum_kernel, summed | {"x": "*fp32", "floor": "*fp32"}, blocks, "4", 4),
        Variant(
            *("absorb and sum", "float32", summing.absorb_and_sum_kernel, absorbed | summed, limited, "16", 16),
            stores=True,
        ),
    ]


def compiled(variants: Iterable[Variant]) -> Iterator[Compiled]:
    """Compile every variant for every architecture; no GPU is needed."""
    for variant in variants:
        for architecture in ARCHITECTURES:
            yield compile_for(variant, architecture)


def compile_for(variant: Variant, architecture: int) -> Compiled:
    """Compile a variant for GPUs of an architecture, as if addresses were multiples of 16 and lengths were not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.function.arg_names
    types = {name: variant.types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(variant.function, types, variant.constants, aligned)
    options = {"num_warps": variant.warps, "enable_fp_fusion": False}
    binary = triton.compile(source, target=GPUTarget("cuda", architecture, WARP), options=options)
    wide = VECTOR.findall(binary.asm["ptx"])
    usage = _resource_usage(binary.asm["cubin"])
    return Compiled(
        kernel=variant.kernel,
        dtypes=variant.dtypes,
        architecture=architecture,
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=binary.metadata.shared,
        vector_loads=wide.count("ld"),
        vector_stores=wide.count("st"),
        wants_loads=variant.loads,
        wants_stores=variant.stores,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return what NVIDIA's cuobjdump, which Triton brings, says of a binary: registers, bytes of stack and so on."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
