"""Regions of the vector, one for each rank, which adds up what all ranks send of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from micro.codecs.base import Key
from micro.codecs.raw import Raw
from micro.comm import Comm
from micro.exchanges.base import Wire, decode_lists
from micro.index_codecs import Int32
from micro.on_device import on_device
from micro.requests import AllToAll, Reduction
from micro.sparse import SparseValues, summed_lists

Spans = Sequence[tuple[int, int]]  # (start, stop) of one region for each rank


@dataclass(frozen=True, slots=True)
class Transport:
    """How entries get from rank to rank.

    Attributes:
        wire: the form of indices and values.
        key: seeds what is random about encoding.
    """

    comm: Comm
    wire: Wire
    key: Key

    def add_up(self, entries: SparseValues, regions: Spans) -> Reduction[tuple[SparseValues, SparseValues]]:
        """Send every entry to the rank in whose region it lies.

        Returns:
            the entries as their receivers decode them; the sums in this rank's region, added in rank order.
        """
        n, own = self.comm.world_size, regions[self.comm.rank]
        ends = on_device([stop for _, stop in regions], torch.int32, entries.indices.device)
        sizes = torch.searchsorted(entries.indices, ends, out_int32=True)
        sizes[1:] -= sizes[:-1].clone()
        received = yield AllToAll(mine=sizes, sizes=[1] * n, received=[1] * n, kind="counts")
        leaving, coming = torch.stack([sizes, received]).tolist()  # host sync: list lengths shape the next message
        sent, parts = yield from self.scatter(entries, (leaving, coming), (regions, (own,) * n))
        return sent, summed_lists(parts, coming)

    def scatter(
        self, entries: SparseValues, sizes: tuple[list[int], list[int]], spans: tuple[Spans, Spans]
    ) -> Reduction[tuple[SparseValues, SparseValues]]:
        """Send neighbouring pieces of a list to the ranks in turn.

        Args:
            sizes: how many entries go to each rank, and how many come from each.
            spans: in which range of the vector the entries for each rank lie, and those from each.
        Returns:
            the entries as their receivers decode them; what the ranks sent to this one, in turn.
        """
        (leaving, coming), (there, here), dtype = sizes, spans, entries.values.dtype
        form, codec = self.wire.indices, self.wire.values
        if self._in_rows(dtype):
            return entries, (yield from self._scatter_rows(entries, leaving, coming))
        wires = self._encoded(entries.values, leaving)
        received = yield from self._scatter_pairs(
            form.encode_joined(entries.indices, leaving, there),
            wires,
            (self._lengths(leaving, there, dtype), self._lengths(coming, here, dtype)),
        )
        if not codec.lossless:
            entries = SparseValues(entries.indices, decode_lists(wires, leaving, codec, dtype))
        indices = form.decode_joined(received[0], coming, here)
        return entries, SparseValues(indices, decode_lists(received[1], coming, codec, dtype))

    def _in_rows(self, dtype: torch.dtype) -> bool:
        """Return whether an entry travels as a row of its index and its value, both as they are."""
        wire = self.wire
        return isinstance(wire.indices, Int32) and isinstance(wire.values, Raw) and dtype.itemsize % 4 == 0

    def _scatter_rows(self, entries: SparseValues, leaving: list[int], coming: list[int]) -> Reduction[SparseValues]:
        """Send entries as rows of an index and a value, so that no list needs to be cut; return what was received."""
        dtype, comm = entries.values.dtype, self.comm
        width = 1 + dtype.itemsize // 4
        row = torch.cat([entries.indices.view(-1, 1), entries.values.view(torch.int32).view(-1, width - 1)], 1)
        sizes, received_sizes = ([width * count for count in counts] for counts in (leaving, coming))
        arrived = yield AllToAll(mine=row.view(-1), sizes=sizes, received=received_sizes, kind="values")
        received = arrived.view(-1, width)
        if comm.world_size > 1:
            comm.traffic.move(4 * (entries.indices.numel() - leaving[comm.rank]), "values", "indices")
        indices, values = (
            column.clone(memory_format=torch.contiguous_format) for column in (received[:, 0], received[:, 1:])
        )
        return SparseValues(indices, values.view(dtype).view(-1))

    def _encoded(self, values: Tensor, counts: list[int]) -> Tensor:
        """Return the messages of lists of values, one after the other; each list of a codec has its own key."""
        codec = self.wire.values
        if codec.lossless:
            return codec.encode(values, self.key)
        parts = enumerate(values.split(counts))
        return torch.cat([codec.encode(part, (*self.key, rank)) for rank, part in parts])

    def _lengths(self, counts: list[int], spans: Spans, dtype: torch.dtype) -> list[int]:
        """Return the bytes of indices and of values of each list, in turn."""
        form, codec = self.wire.indices, self.wire.values
        both = (
            (form.num_bytes(count, stop - start), codec.num_bytes(count, dtype))
            for count, (start, stop) in zip(counts, spans, strict=True)
        )
        return [length for pair in both for length in pair]

    def _scatter_pairs(
        self, places: Tensor, wires: Tensor, lengths: tuple[list[int], list[int]]
    ) -> Reduction[list[Tensor]]:
        """Send to each rank its indices and then its values in one message; return all indices and all values received.

        Args:
            places, wires: (bytes,) uint8, those for each rank one after the other.
            lengths: of what leaves and of what comes; see `_lengths`.
        """
        comm, (leaving, coming) = self.comm, lengths
        pairs = zip(places.split(leaving[::2]), wires.split(leaving[1::2]), strict=True)
        message = torch.cat([part for pair in pairs for part in pair])
        arrived = yield AllToAll(mine=message, sizes=_in_pairs(leaving), received=_in_pairs(coming), kind="values")
        received = arrived.split(coming)
        if comm.world_size > 1:
            away = places.numel() - leaving[2 * comm.rank]
            comm.traffic.move(away, "values", "indices")
        return [torch.cat(received[::2]), torch.cat(received[1::2])]


def _in_pairs(lengths: list[int]) -> list[int]:
    return [sum(pair) for pair in zip(lengths[::2], lengths[1::2], strict=True)]
