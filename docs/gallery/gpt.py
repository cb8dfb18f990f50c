"""A small GPT after nanoGPT and its text, for the scripts beside this file. Needs torch alone."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

LENGTH = 32  # tokens of a sequence
WIDTH, HEADS, LAYERS = 32, 4, 2


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, _ = x.shape
        heads = self.attention(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte of a text. The same seed gives the same weights on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of predicting ``labels`` (batch, length) from ``inputs`` (batch, length)."""
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        logits = self.head(self.norm(self.blocks(x)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Text(Dataset[dict[str, Tensor]]):
    """Sequences of a text, this file's own by default, in an order that is drawn once."""

    def __init__(self, path: str = __file__) -> None:
        self._bytes = torch.tensor(list(Path(path).read_text().encode("ascii")))
        starts = range(0, len(self._bytes) - LENGTH, LENGTH // 2)
        self._starts = torch.tensor(starts)[torch.randperm(len(starts), generator=torch.Generator().manual_seed(0))]

    def __len__(self) -> int:
        return len(self._starts) // 16 * 16  # whole batches alone

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self._starts[index]
        return {"inputs": self._bytes[start : start + LENGTH], "labels": self._bytes[start + 1 : start + LENGTH + 1]}


def batches_of(rank: int, world_size: int, size: int = 8) -> list[range]:
    """Return the indices of each of this rank's batches of an epoch: every world_size-th batch is its own."""
    batches = [range(start, start + size) for start in range(0, len(Text()), size)]
    return batches[rank : len(batches) // world_size * world_size : world_size]
