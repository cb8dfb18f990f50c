"""The LSTM language model: an embedding, LSTM layers, and a decoder with the embedding's weight.

Source: Zaremba, Sutskever & Vinyals, Recurrent Neural Network Regularization, 2014, arXiv 1409.2329, for the positions
of dropout; Press & Wolf, Using the Output Embedding to Improve Language Models, EACL 2017, arXiv 1608.05859, for the
tied decoder.
"""

from torch import Tensor, nn

from models.registry import positive, probability, register

Carry = tuple[Tensor, Tensor]  # the hidden and the cell states, (num_layers, batch, hidden) each
INITIAL_RANGE = 0.1  # as embedding and decoder of PyTorch's example word_language_model


class LanguageModel(nn.Module):
    """Maps words to logits of the next words; dropout after the embedding, between layers and before the decoder."""

    def __init__(self, *, num_words: int, hidden: int, num_layers: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, hidden)
        self.lstm = nn.LSTM(
            hidden,
            hidden,
            num_layers,
            batch_first=True,
            dropout=dropout if num_layers > 1 else 0.0,  # torch warns about dropout with a single layer
        )
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden, num_words)
        nn.init.uniform_(self.decoder.weight, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.embedding.weight = self.decoder.weight
        else:
            nn.init.uniform_(self.embedding.weight, -INITIAL_RANGE, INITIAL_RANGE)

    def forward(self, words: Tensor, carry: Carry | None) -> tuple[Tensor, Carry]:
        """Map (batch, steps) int64 words to (batch, steps, num_words) logits of the words that follow.

        Args:
            words: the next steps of each row's text.
            carry: the state returned by the previous call, or None at the beginning of the text.
        """
        outputs, carry = self.lstm(self.dropout(self.embedding(words)), carry)
        return self.decoder(self.dropout(outputs)), carry


@register("text")
def lstm(
    *, num_words: int, hidden: int = 650, num_layers: int = 3, dropout: float = 0.4, tied: bool = True
) -> nn.Module:
    """Build the LSTM that the authors of MiCRO train on WikiText-2.

    28,949,319 parameters for 28,869 words, as in the authors' scripts; 31,819,578 for WikiText-2's 33,278 words.

    Args:
        hidden: width of the embedding and of every layer.
        dropout: share of values set to zero in training.
        tied: let the decoder share the embedding's weight.

    Initialised as in PyTorch's example word_language_model: embedding and decoder uniform in +-0.1, the decoder's bias
    zero, the layers as in `torch.nn.LSTM`.

    Raises:
        ValueError: a setting out of range.
    """
    positive(hidden=hidden, num_layers=num_layers)
    probability(dropout=dropout)
    if not isinstance(tied, bool):
        raise ValueError(f"tied must be true or false, got {tied!r}")
    return LanguageModel(num_words=num_words, hidden=hidden, num_layers=num_layers, dropout=dropout, tied=tied)
