"""The character-aware language model (CNN-LSTM): reads words as characters and predicts words.

Source: Kim, Jernite, Sontag & Rush, Character-Aware Neural Language Models, AAAI 2016, arXiv 1508.06615.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.registry import probability, register

Carry = tuple[Tensor, Tensor]  # the hidden and the cell states, (num_layers, batch, hidden) each
CHARACTER_WIDTH = 15  # width of a character's embedding; table 2
NUM_LSTM_LAYERS = 2  # table 2
INITIAL_RANGE = 0.05  # all parameters; the paper's paragraph on optimisation
GATE_BIAS = -2.0  # gates start nearly closed: a highway first passes its input through


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A column of table 2: filters per convolution width, number of highway layers, width of the LSTM."""

    filters: Mapping[int, int]
    num_highways: int
    hidden: int


ARCHITECTURES = {
    "tiny": Architecture(filters={width: 4 * width for width in range(1, 4)}, num_highways=1, hidden=16),
    "small": Architecture(filters={width: 25 * width for width in range(1, 7)}, num_highways=1, hidden=300),
    "large": Architecture(filters={width: min(200, 50 * width) for width in range(1, 8)}, num_highways=2, hidden=650),
}


class Highway(nn.Module):
    """A layer that learns how much of its input to change."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (num, width) to (num, width)."""
        return torch.lerp(inputs, F.relu(self.change(inputs)), torch.sigmoid(self.gate(inputs)))


class WordReader(nn.Module):
    """Maps letters to one vector: convolutions of several widths, max over positions, highways."""

    def __init__(self, num_characters: int, architecture: Architecture) -> None:
        super().__init__()
        self.width = sum(architecture.filters.values())
        self.widest = max(architecture.filters)
        self.embedding = nn.Embedding(num_characters, CHARACTER_WIDTH, padding_idx=0)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(CHARACTER_WIDTH, filters, width) for width, filters in architecture.filters.items()
        )
        self.highways = nn.Sequential(*(Highway(self.width) for _ in range(architecture.num_highways)))

    def forward(self, letters: Tensor) -> Tensor:
        """Map (num, word_length) int64 characters, padded with 0, to (num, width)."""
        missing = max(0, self.widest - letters.shape[1])  # the widest convolution needs so many characters
        signals = self.embedding(F.pad(letters, (0, missing))).transpose(1, 2)
        # tanh is increasing, so taking the maximum first leaves fewer values for tanh.
        features = [torch.tanh(convolution(signals).amax(dim=2)) for convolution in self.convolutions]
        return self.highways(torch.cat(features, dim=1))


class CharacterLanguageModel(nn.Module):
    """Maps words, read letter by letter, to logits of the next words.

    Attributes:
        spelling: (num_words, word_length) int64 buffer, the characters of every word; 0 is padding. It is zero until
            it is filled, and not part of the state_dict, since it comes from the data set and is not learnt.
    """

    spelling: Tensor

    def __init__(
        self, *, num_words: int, num_characters: int, word_length: int, architecture: Architecture, dropout: float
    ) -> None:
        super().__init__()
        self.register_buffer("spelling", torch.zeros(num_words, word_length, dtype=torch.int64), persistent=False)
        self.reader = WordReader(num_characters, architecture)
        self.lstm = nn.LSTM(self.reader.width, architecture.hidden, NUM_LSTM_LAYERS, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(architecture.hidden, num_words)
        self._initialise_()

    def forward(self, words: Tensor, carry: Carry | None) -> tuple[Tensor, Carry]:
        """Map (batch, steps) int64 words to (batch, steps, num_words) logits of the words that follow.

        Args:
            words: the next steps of each row's text.
            carry: what the steps before returned, or None at the beginning of the text.
        """
        # A word has the same characters wherever it occurs, so each distinct word is read once.
        distinct, places = torch.unique(words, return_inverse=True)  # host sync: the number of distinct words
        vectors = F.embedding(places, self.reader(self.spelling[distinct]))
        outputs, carry = self.lstm(vectors, carry)
        return self.decoder(self.dropout(outputs)), carry

    def _initialise_(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.zeros_(self.reader.embedding.weight[0])
        for module in self.modules():
            if isinstance(module, Highway):
                nn.init.constant_(module.gate.bias, GATE_BIAS)


@register("text")
def cnn_lstm(
    *, num_words: int, num_characters: int, word_length: int, size: str = "small", dropout: float = 0.5
) -> nn.Module:
    """Build the paper's character-level model; the caller fills its buffer ``spelling`` from the text.

    5,312,515 parameters for 10,000 words and 51 characters with size small, 19,373,165 with large: the paper's 5 and
    19 million for the Penn Treebank.

    Args:
        size: ``small`` or ``large``, the paper's two, or ``tiny``, for quick runs on a CPU.
        dropout: share of values set to zero in training, between the LSTM's layers and before the decoder.

    Differences from the paper: `torch.nn.LSTM` has two bias vectors where one would do.

    Raises:
        ValueError: a setting out of range.
    """
    if size not in ARCHITECTURES:
        raise ValueError(f"size must be one of {', '.join(ARCHITECTURES)}, got {size!r}")
    probability(dropout=dropout)
    return CharacterLanguageModel(
        num_words=num_words,
        num_characters=num_characters,
        word_length=word_length,
        architecture=ARCHITECTURES[size],
        dropout=dropout,
    )
