"""The kernels of the quantisers, for compiling them ahead of time."""

from typing import Any

from experiments.benchmarks.compiled_kernels import Variant

_VALUES = {"values": "*fp32", "numel": "i32"}
_WORDS = {"first": "i32", "second": "i32"}
_SCALES = {"scales": "*fp32", "packed": "*u8"}


def code_variants() -> list[Variant]:
    """Return every kernel of the quantisers with the settings that its codec has by default."""
    return [*_encoding(), *_decoding()]


def _encoding() -> list[Variant]:
    from micro.kernels.triton import casting, encoding
    from micro.kernels.triton.blockwise import TILE
    from micro.kernels.triton.launching import ALIGNED, BLOCK

    def rows(block: int, **constants: Any) -> dict[str, Any]:
        return {"ROWS": TILE // block, "BLOCK": block, **constants}

    scaled = _VALUES | _WORDS | _SCALES
    single = {"ALIGNED": ALIGNED, "BLOCK": BLOCK}
    natural = _VALUES | _WORDS | {"codes": "*u8", "below": "*i32", "highest": "*i32"}
    digits = {"digits": "*u8", "packed": "*u8", "numel": "i32"}
    fits = {"IS_LEAST_SQUARES": True}
    return [
        Variant(
            *("int8", "float32", encoding.int8_kernel, scaled | {"codes": "*i8"}),
            *(rows(256, IS_RANDOM=False), "5", 5),
        ),
        Variant(
            *("qsgd, 4 bits", "float32", encoding.levels_kernel, scaled),
            *(rows(512, **fits, WIDTH=4, HALVINGS=9), "4.5", 4.5),
        ),
        Variant(
            *("terngrad", "float32", encoding.ternary_kernel, scaled | {"digits": "*u8", "clip": "fp32"}),
            *(rows(1024, **fits, HALVINGS=10), "5", 5),
        ),
        Variant(
            *("terngrad, packing", "uint8", encoding.pack_ternary_kernel, digits),
            *({"BLOCK": BLOCK}, "1.2", 1.2),
            loads=False,
        ),
        Variant(
            *("onebit", "float32", encoding.signs_kernel, _VALUES | _SCALES | {"uppers": "*fp32", "lowers": "*fp32"}),
            *(rows(1024, HAS_TWO=True, HALVINGS=10), "4.1", 4.125),
        ),
        Variant(
            *("bfloat16", "float32", casting.cast_kernel, _VALUES | {"codes": "*i16"}),
            *({**single, "IS_HALF": False}, "6", 6),
            stores=True,
        ),
        Variant(
            *("natural, highest", "float32", casting.highest_power_kernel, natural),
            *({**single, "IS_RANDOM": True}, "4", 4),
        ),
        Variant(*("natural", "float32", casting.natural_kernel, natural), *({**single, "IS_RANDOM": True}, "5", 5)),
    ]


def _decoding() -> list[Variant]:
    from micro.kernels.triton import decoding
    from micro.kernels.triton.launching import ALIGNED, BLOCK

    types = {"scales": "*fp32", "packed": "*u8", "x": "*fp32", "out": "*fp32", "is_finite": "*i32", "rows": "i32"}
    types |= {"row_scales": "i32", "row_codes": "i32", "divisor": "fp32", "numel": "i32"}
    kinds = [
        ("bfloat16", decoding.CAST, (False,), 2.0),
        ("natural", decoding.NATURAL, (), 1.0),
        ("int8", decoding.LEVELS, (8, 128, -128, 256), 1.0),
        ("qsgd, 4 bits", decoding.LEVELS, (4, 0, -7, 512), 0.5),
        ("terngrad", decoding.LEVELS, (decoding.TERNARY, 0, -1, 1024), 0.2),
        ("sign", decoding.SIGNS, (1024,), 0.125),
        ("onebit", decoding.MEANS, (1024,), 0.125),
    ]

    def variant(name: str, kind: int, settings: tuple[int, ...], num_bytes: float, *, is_rest: bool) -> Variant:
        constants = {"KIND": kind, "SETTINGS": settings, "IS_REST": is_rest, "IS_MEAN": not is_rest}
        moved = num_bytes + (8 if is_rest else 4)
        return Variant(
            *(f"{name}, {'what is left' if is_rest else 'mean'}", "float32", decoding.decode_kernel),
            *(
                types | ({"packed": "*i16"} if name == "bfloat16" else {}),
                {**constants, "ALIGNED": ALIGNED, "BLOCK": BLOCK},
            ),
            *(f"{moved:g}" if is_rest else f"4, and {num_bytes:g} for each message", moved),
            loads=is_rest,
            stores=True,
        )

    return [variant(*kind, is_rest=is_rest) for kind in kinds for is_rest in (False, True)]
