"""torch.distributed.checkpoint with an attachment: every rank's state is saved, loaded, and gone on from."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import micro
from micro.checkpoints.rank_states import state_of
from tests.dist.ddp_steps import MICRO, TINY_MB, Net, build, ddp_gradients, one_loss, wrap
from tests.dist.on_ranks import of_all, on_ranks
from tests.refusals import refused

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


class Run:
    """A model, its optimizer and its attachment, as a script would make them."""

    def __init__(self) -> None:
        self.model, self.attachment = wrap(build(Net), MICRO, bucket_cap_mb=TINY_MB)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train(self, steps: range) -> Tensor:
        """Return the weights after these steps."""
        for step in steps:
            ddp_gradients(self.model, one_loss, step)
            self.optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


@on_ranks(2)
def test_both_ranks_go_on_from_one_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    rank, whole, resumed = dist.get_rank(), Run(), Run()
    whole.train(range(3))
    state = {"model": whole.model.module.state_dict(), "micro": micro.RankStates(whole.attachment)}
    dcp.save(state, checkpoint_id=str(tmp_path))
    first, second = of_all(float(torch.cat(whole.attachment.residuals()).abs().sum()))
    assert first != second, "the ranks' residuals are equal: this test would not see rank 0's on rank 1"
    weights = resumed.model.module.state_dict()
    dcp.load({"model": weights, "micro": micro.RankStates(resumed.attachment)}, checkpoint_id=str(tmp_path))
    resumed.model.module.load_state_dict(weights)
    assert torch.equal(resumed.train(range(3, 6)), whole.train(range(3, 6)))

    raw: dict[str, dict[str, bytes]] = {"micro": {"rank0": b"", "rank1": b""}}
    dcp.load(raw, checkpoint_id=str(tmp_path))
    states = [state_of(raw["micro"][f"rank{each}"]) for each in range(2)]
    whole.attachment.load_state_dict(states[rank])
    other, of_three = states[1 - rank], micro.average(states, 3)[rank]
    refused(lambda: whole.attachment.load_state_dict(other), f"rank {1 - rank}, this is rank {rank}", "every rank")
    refused(lambda: whole.attachment.load_state_dict(of_three), "micro.average(states, 2)[rank]", "world_size 3")
