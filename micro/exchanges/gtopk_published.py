"""gTop-k as in its public code: pruned values may be lost, and entries travel as two float64."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs.base import from_bytes, to_bytes
from micro.exchanges.base import Exchange, Wire
from micro.exchanges.gtopk import GTopK
from micro.index_codecs import IndexCodec, Int32
from micro.sparse import SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGTopK(GTopK):
    """Merge lists of k entries in a tree, and keep of the own choice what is not in the update: the public code.

    A value pruned in one part of the tree is lost where its index comes in from another. An index and a value travel as
    two float64, as happens in the code when int64 indices and float32 values are joined: 16 bytes in place of the 4 + w
    of `GTopK`.

    Source: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
    Networks, ICDCS 2019, arXiv 1901.04359, and its public code. Differences: any number of ranks (the code fails unless
    it is a power of two).

    Raises:
        ValueError: any form of indices but int32, when a reducer is composed.
    """

    name: ClassVar[str] = "gtopk"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False

    def check_wire(self, wire: Wire) -> None:
        """Raise ValueError where values or indices cannot travel in this form."""
        Exchange.check_wire(self, wire)
        if not isinstance(wire.indices, Int32):
            raise ValueError(f"rule published of gtopk sends indices as float64, got indices {wire.indices.name}")

    def entry_form(self, wire: Wire, dtype: torch.dtype) -> tuple[IndexCodec, torch.dtype]:
        """Return float64 for both."""
        return _AsFloat64(), torch.float64

    def sent(self, mine: SparseValues, pruned: list[SparseValues], total: SparseValues) -> SparseValues:
        """Return what of this rank's choice is in the update."""
        return mine.where(torch.isin(mine.indices, total.indices))


class _AsFloat64(IndexCodec):
    """Indices travel as float64: eight bytes each."""

    def num_bytes(self, count: int, span: int) -> int:
        return 8 * count

    def encode(self, indices: Tensor, span: int) -> Tensor:
        return to_bytes(indices.double())

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        return from_bytes(wire, torch.float64).to(torch.int32)
