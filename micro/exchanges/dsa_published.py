"""DSA as in public code: the smallest entry of each choice is lost, and sums travel dense from a third on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from micro.codecs.raw import Raw
from micro.exchanges.base import Exchange, Wire
from micro.exchanges.dsa import DSA
from micro.exchanges.traffic import Choice
from micro.sparse import SparseValues
from micro.traffic import Calls


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDSA(DSA):
    """Add up entries in regions and gather the sums, dense where the update has at least numel / 3 indices.

    A rank sends of its choice only what is strictly above the smallest magnitude in it, but its residual loses the
    whole choice: that entry and its ties are lost in every step. Bytes as with `DSA`.

    Source: the baseline TopkDSA in the public code of Li and Hoefler, Ok-Topk, PPoPP 2022, arXiv 2201.07598, after
    Renggli et al., SparCML, SC 2019, arXiv 1802.08021. Differences: int32 indices (the code sends them as float32);
    regions differ by one element at most (its last takes what is left), also with fewer elements than ranks (it divides
    by zero).

    Raises:
        ValueError: a codec for values, when a reducer is composed.
    """

    name: ClassVar[str] = "dsa"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    def check_wire(self, wire: Wire) -> None:
        """Raise ValueError where values or indices cannot travel in this form."""
        Exchange.check_wire(self, wire)
        if not isinstance(wire.values, Raw):
            raise ValueError(f"rule published of dsa sends values as they are, got codec {wire.values.name}: use raw")

    def leaving(self, chosen: SparseValues) -> SparseValues:
        """Return the entries whose magnitude is strictly above the smallest among them."""
        if not chosen.indices.numel():
            return chosen
        magnitudes = chosen.values.abs()
        return chosen.where(magnitudes > magnitudes.min())

    def is_dense(self, sizes: Sequence[int], counts: Sequence[int], wire: Wire, dtype: torch.dtype) -> bool:
        """Return whether the update has at least a third of all indices."""
        return 3 * sum(counts) >= sum(sizes)

    def sent(self, chosen: SparseValues, decoded: list[SparseValues]) -> SparseValues:
        """Return the whole choice, although not all of it was sent."""
        return chosen

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Return what `DSA` sends, but for the entry that is kept back; see Exchange."""
        return DSA.volume(self, replace(choice, chosen=choice.chosen - 1))
