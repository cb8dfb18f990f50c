"""gTop-k: merge the ranks' lists two by two in a tree, keep k of every merged list, and share the last one."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from micro.exchanges.base import Wire
from micro.exchanges.merge_tree import TreeExchange
from micro.index_codecs import IndexCodec
from micro.sparse import SparseValues, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class GTopK(TreeExchange):
    """Merge lists of k entries two by two in a tree, prune every merged list to k, broadcast the last one.

    The update has k entries however many ranks there are: no build-up. They are nearly the k largest of the sum: what
    one merge prunes may have been large on other ranks. A rank keeps in its residual what it prunes from a merged list,
    whichever rank chose it, so that nothing is lost. Any number of ranks works: one without a partner waits for the
    next round. Ties go to the lowest index. A round is one message: counts and the finite flags are in it, and it has
    room for k entries even where ranks choose fewer.

    Bytes sent, with int32 indices and values of w bytes: (4 + w) k by every rank but the first on the way up the tree,
    (4 + w) k (n-1)/n for the broadcast; ahead of that, 4 bytes for each rank whose choice is in the list, and 4 more.

    Source: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
    Networks, ICDCS 2019, arXiv 1901.04359, and its public code. Differences: what the residuals keep; any number of
    ranks (the code fails unless it is a power of two); entries of 4 + w bytes. `PublishedGTopK` follows the public
    code.
    """

    name: ClassVar[str] = "gtopk"
    rule: ClassVar[str] = "repaired"

    def entry_form(self, wire: Wire, dtype: torch.dtype) -> tuple[IndexCodec, torch.dtype]:
        """Return the given form of indices, and values as they are."""
        return wire.indices, dtype

    def sent(self, mine: SparseValues, pruned: list[SparseValues], total: SparseValues) -> SparseValues:
        """Return this rank's choice less what it pruned."""
        return summed([mine, *pruned])
