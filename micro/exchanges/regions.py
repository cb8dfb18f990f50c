"""Regions of the vector, one for each rank, which adds up what all ranks send of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from micro.codecs.base import Key
from micro.comm import Comm
from micro.exchanges.base import Wire
from micro.on_device import on_device
from micro.sparse import SparseValues, summed

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

    def add_up(self, entries: SparseValues, regions: Spans) -> tuple[SparseValues, SparseValues]:
        """Send every entry to the rank in whose region it lies.

        Returns:
            the entries as their receivers decode them; the sums in this rank's region, added in rank order.
        """
        n, own = self.comm.world_size, regions[self.comm.rank]
        ends = on_device([stop for _, stop in regions], torch.int32, entries.indices.device)
        sizes = torch.searchsorted(entries.indices, ends, out_int32=True)
        sizes[1:] -= sizes[:-1].clone()
        received = self.comm.scatter_parts(sizes, [1] * n, "counts").view(-1)
        leaving, coming = torch.stack([sizes, received]).tolist()  # host sync: list lengths shape the next message
        sent, parts = self.scatter(entries, (leaving, coming), (regions, (own,) * n))
        return sent, summed(parts)

    def scatter(
        self, entries: SparseValues, sizes: tuple[list[int], list[int]], spans: tuple[Spans, Spans]
    ) -> tuple[SparseValues, list[SparseValues]]:
        """Send neighbouring pieces of a list to the ranks in turn.

        Args:
            sizes: how many entries go to each rank, and how many come from each.
            spans: in which range of the vector the entries for each rank lie, and those from each.
        Returns:
            the entries as their receivers decode them; what each rank sent to this one.
        """
        (leaving, coming), (there, here), dtype = sizes, spans, entries.values.dtype
        form, codec = self.wire.indices, self.wire.values
        pieces = zip(entries.indices.split(leaving), there, strict=True)
        places = [form.encode(piece - start, stop - start) for piece, (start, stop) in pieces]
        wires = [codec.encode(part, (*self.key, rank)) for rank, part in enumerate(entries.values.split(leaving))]
        ahead = [form.num_bytes(count, stop - start) for count, (start, stop) in zip(coming, here, strict=True)]
        blobs = self._scatter_pairs(places, wires, ahead, [codec.num_bytes(count, dtype) for count in coming])
        split = [(blob[:size], blob[size:]) for blob, size in zip(blobs, ahead, strict=True)]
        spots = zip(split, coming, here, strict=True)
        indices = [form.decode(first, count, stop - start) + start for (first, _), count, (start, stop) in spots]
        values = [codec.decode(second, count, dtype) for (_, second), count in zip(split, coming, strict=True)]
        if not codec.lossless:
            decoded = [codec.decode(blob, count, dtype) for blob, count in zip(wires, leaving, strict=True)]
            entries = SparseValues(entries.indices, torch.cat(decoded))
        return entries, [SparseValues(i, v) for i, v in zip(indices, values, strict=True)]

    def _scatter_pairs(
        self, places: list[Tensor], wires: list[Tensor], place_bytes: list[int], value_bytes: list[int]
    ) -> list[Tensor]:
        """Send to each rank its indices and then its values in one message; return the messages received.

        Args:
            places, wires: (bytes,) uint8 for each rank.
            place_bytes, value_bytes: how long both are in the message of each rank.
        """
        comm = self.comm
        messages = [torch.cat(pair) for pair in zip(places, wires, strict=True)]
        expected = [sum(pair) for pair in zip(place_bytes, value_bytes, strict=True)]
        received = comm.scatter_lists(messages, expected, "values")
        if comm.world_size > 1:
            away = [place.numel() for rank, place in enumerate(places) if rank != comm.rank]
            comm.traffic.move(sum(away), "values", "indices")
        return received
