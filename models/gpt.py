"""GPT-2: a transformer decoder that predicts each word from the words before it.

Source: Radford, Wu, Child, Luan, Amodei & Sutskever, Language Models are Unsupervised Multitask Learners, 2019, for the
layers, their order and initialisation; Su et al., RoFormer, 2021, arXiv 2104.09864, for rotary positions.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.registry import positive, probability, register

INITIAL_STD = 0.02
POSITIONS = ("learned", "rope")
ROPE_BASE = 10_000.0


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, *, hidden: int, num_heads: int, dropout: float, is_rotated: bool) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.is_rotated = num_heads, dropout, is_rotated
        self.inputs = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, steps, hidden) to the same shape."""
        heads = self.inputs(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads.unbind(0)  # (batch, num_heads, steps, hidden / num_heads)
        if self.is_rotated:
            queries, keys = rotated(queries), rotated(keys)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=dropout)
        return self.output(mixed.transpose(1, 2).flatten(2))


def rotated(heads: Tensor) -> Tensor:
    """Apply rotary position embedding to (batch, num_heads, steps, width)."""
    steps, width = heads.shape[-2:]
    speeds = ROPE_BASE ** (-torch.arange(0, width, 2, device=heads.device, dtype=torch.float32) / width)
    angles = torch.arange(steps, device=heads.device, dtype=torch.float32)[:, None] * speeds
    cosines, sines = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)


class Layer(nn.Module):
    """A pre-norm transformer layer: attention, then two linear maps, each with a residual connection."""

    def __init__(self, *, hidden: int, num_heads: int, dropout: float, is_rotated: bool) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden=hidden, num_heads=num_heads, dropout=dropout, is_rotated=is_rotated)
        self.norm_2 = nn.LayerNorm(hidden)
        self.widen = nn.Linear(hidden, 4 * hidden)
        self.narrow = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, steps, hidden) to the same shape."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        inner = F.gelu(self.widen(self.norm_2(x)), approximate="tanh")
        return x + self.dropout(self.narrow(inner))


class Decoder(nn.Module):
    """Maps words to logits of the next words; the output layer shares the embedding's weight."""

    def __init__(
        self,
        *,
        num_words: int,
        hidden: int,
        num_layers: int,
        num_heads: int,
        max_length: int,
        positions: str,
        dropout: float,
    ) -> None:
        super().__init__()
        is_rotated = positions == "rope"
        self.max_length = max_length
        self.embedding = nn.Embedding(num_words, hidden)
        self.positions = None if is_rotated else nn.Embedding(max_length, hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(hidden=hidden, num_heads=num_heads, dropout=dropout, is_rotated=is_rotated) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self._initialize(num_layers)

    def _initialize(self, num_layers: int) -> None:
        """Draw all weights; layers that write to the residual stream are scaled down with the number of layers."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_added = name.endswith(("attention.output", "narrow"))
                nn.init.normal_(module.weight, std=INITIAL_STD / (math.sqrt(2 * num_layers) if is_added else 1.0))
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def flops_per_word(self, length: int) -> int:
        """Return the floating-point operations of forward per word in a row of ``length``, of matrix products only.

        A linear layer with m weights counts 2 m, including the tied output layer; attention, 4 * hidden * length per
        layer, without the saving of the causal mask.
        """
        maps = [module.weight for module in self.modules() if isinstance(module, nn.Linear)]
        hidden = self.embedding.weight.shape[1]
        numel = sum(weight.numel() for weight in maps) + self.embedding.weight.numel()
        return 2 * numel + 4 * len(self.layers) * hidden * length

    def forward(self, words: Tensor, carry: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Map (batch, steps) int64 words to (batch, steps, num_words) logits of the words that follow.

        Args:
            words: a window of each row's text.
            carry: ignored; windows are independent.

        Raises:
            ValueError: more steps than max_length.
        """
        steps = words.shape[1]
        if steps > self.max_length:
            raise ValueError(
                f"gpt was built for at most {self.max_length} words in a row, got {steps}: raise max_length or shorten "
                "the rows"
            )
        x = self.embedding(words)
        if self.positions is not None:
            x = x + self.positions(torch.arange(steps, device=words.device))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight), ()


@register("text")
def gpt(
    *,
    num_words: int,
    hidden: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    max_length: int = 1024,
    positions: str = "learned",
    dropout: float = 0.0,
) -> nn.Module:
    """Build a GPT-2 with tied embeddings.

    124,439,808 parameters for GPT-2's 50,257 words. For 256 bytes, with rotary positions: 31,655,936 with 10 layers of
    512, 10,745,856 with 6 of 384, 826,112 with 4 of 128.

    Args:
        hidden: width of the embeddings and of every layer.
        max_length: the longest row; also the number of learned positions.
        positions: 'learned', as in GPT-2, or 'rope', rotary.
        dropout: share of values and of attention weights set to zero in training.

    Raises:
        ValueError: a setting out of range.
    """
    positive(hidden=hidden, num_layers=num_layers, num_heads=num_heads, max_length=max_length)
    probability(dropout=dropout)
    if positions not in POSITIONS:
        raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
    if hidden % (2 * num_heads):
        raise ValueError(f"hidden must be a multiple of 2 num_heads, got {hidden} and {num_heads}")
    return Decoder(
        num_words=num_words,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        max_length=max_length,
        positions=positions,
        dropout=dropout,
    )
