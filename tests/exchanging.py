"""Exchange chosen elements on simulated ranks."""

import torch
from torch import Tensor

import micro
from micro.comm.lockstep import SimulatedRanks
from micro.comm.loop import carried_out
from micro.comm.ranks import Comm, Traffic
from micro.exchanges.base import Transport, Wire
from micro.values.sparse import Exchanged, Overlap, Selection, Step


def exchanged(
    part: micro.Exchange,
    acc: Tensor,
    chosen: list[list[int]],
    *,
    target_count: int = 1,
    wire: Wire | None = None,
    bad_rank: int | None = None,
    overlap: Overlap = Overlap.ANY,
    counts: tuple[int, ...] | None = None,
) -> tuple[list[Exchanged], list[Traffic]]:
    """Return what each rank gets and what it sends; acc is (world_size, numel), chosen the indices per rank.

    The gradient of ``bad_rank`` counts as not finite; ``counts`` are said where the selector knew them.
    """

    def work(comm: Comm) -> tuple[Exchanged, Traffic]:
        comm.begin_step()
        step = Step(0, target_count, 0, micro.Layout.flat(acc.shape[1]), is_finite=comm.rank != bad_rank)
        transport = Transport(comm=comm, step=step, overlap=overlap, wire=wire or Wire())
        selection = Selection(torch.tensor(chosen[comm.rank], dtype=torch.int32), counts)
        reduction = part.exchange(part.start(), acc[comm.rank], selection, transport)
        return carried_out(reduction, comm), comm.traffic

    results = SimulatedRanks(len(chosen)).run(work)
    return [result for result, _ in results], [traffic for _, traffic in results]
