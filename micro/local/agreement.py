"""What ranks tell each other before every exchange: where each is, and which fragment is the next."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from micro.comm import Comm
from micro.requests import AllGather


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is when it comes to an exchange.

    Attributes:
        fragment: that it is to exchange; None: it has finished, and takes part in what the others exchange.
        num_rounds: of each fragment, how many exchanges have ended.
        moved: of each fragment, whether this rank has moved its parameters since its last exchange.
    """

    fragment: int | None
    num_rounds: Sequence[int]
    moved: Sequence[bool]

    def next_exchange(self, comm: Comm, device: torch.device) -> int | None:
        """Return the fragment that is exchanged next, the same on all ranks; None where no rank has anything left.

        All ranks call this together, by one message of 8 (1 + 2 P) bytes for P fragments. While any rank goes on with
        its steps it says which; once all have finished, fragments that any of them has moved follow in turn.

        Raises:
            RuntimeError: on all ranks, where those that go on have come to different exchanges.
        """
        own = [-1 if self.fragment is None else self.fragment, *self.num_rounds, *map(int, self.moved)]
        mine = torch.tensor(own, dtype=torch.int64, device=device)
        rows: list[list[int]] = comm.answer(AllGather(mine=mine)).tolist()  # host sync: once a round, ranks act on it
        count = len(self.num_rounds)
        going_on = {rank: row[0] for rank, row in enumerate(rows) if row[0] >= 0}
        if not going_on:
            return next((each for each in range(count) if any(row[1 + count + each] for row in rows)), None)
        first, fragment = next(iter(going_on.items()))
        for rank, row in enumerate(rows):
            ends = row[0] < 0
            if (row[0] != fragment and not ends) or row[1 + fragment] != rows[first][1 + fragment]:
                places = ", ".join(
                    f"rank {each} is at round {rows[each][1 + fragment]}"
                    + (f" of fragment {rows[each][0]}" if rows[each][0] >= 0 else "")
                    for each in (first, rank)
                )
                raise RuntimeError(f"ranks must exchange at the same place: {places}")
        return fragment
