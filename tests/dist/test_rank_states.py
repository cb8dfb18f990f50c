"""torch.distributed.checkpoint with an attachment: every rank's state is saved, loaded, and gone on from."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.checkpoints.rank_states import state_of
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]

REDUCER = micro.SparseReducer(micro.Micro(), density=0.1)


class Run:
    """A model, its optimizer and its attachment, as a script would make them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.model = DistributedDataParallel(network, bucket_cap_mb=5e-4)
        self.attachment = micro.attach(self.model, REDUCER)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 12, generator=generator)).square().mean().backward()
            self.optimizer.step()

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def saved_and_resumed(folder: str) -> tuple[bool, list[float], list[str]]:
    """Return whether a resumed run equals the whole one, the ranks' residuals, and what refusals say."""
    whole = Run()
    whole.train(0, 3)
    state = {"model": whole.model.module.state_dict(), "micro": micro.RankStates(whole.attachment)}
    dcp.save(state, checkpoint_id=folder)
    residual = float(torch.cat(whole.attachment.residuals()).abs().sum())
    whole.train(3, 6)
    resumed = Run()
    weights = resumed.model.module.state_dict()
    dcp.load({"model": weights, "micro": micro.RankStates(resumed.attachment)}, checkpoint_id=folder)
    resumed.model.module.load_state_dict(weights)
    resumed.train(3, 6)
    raw: dict[str, dict[str, bytes]] = {"micro": {"rank0": b"", "rank1": b""}}
    dcp.load(raw, checkpoint_id=folder)
    words = [refusal(Run().attachment, state_of(raw["micro"]["rank0"]))]
    states = [state_of(raw["micro"][f"rank{rank}"]) for rank in range(2)]
    words.append(refusal(Run().attachment, micro.average(states, 3)[dist.get_rank()]))
    return torch.equal(resumed.weights(), whole.weights()), [residual], words


def refusal(attachment: micro.Attachment, saved: dict[str, object]) -> str:
    try:
        attachment.load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_both_ranks_go_on_from_one_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    first, second = ranks(2).run(saved_and_resumed, str(tmp_path))
    assert first[0]
    assert second[0]
    assert first[1] != second[1], "the ranks' residuals are equal: this test would not see rank 0's on rank 1"
    assert first[2][0] == "loaded"
    assert second[2][0].startswith("state is of rank 0, this is rank 1: save the state of every rank")
    assert first[2][1].startswith("state is of world_size 3, this group has 2: load micro.average(states, 2)[rank]")
