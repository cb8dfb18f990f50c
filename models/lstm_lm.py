"""The recurrent language model: an embedding, LSTM layers, and a decoder that shares the embedding's weight.

Source: Zaremba, Sutskever & Vinyals, Recurrent Neural Network Regularization, 2014, arXiv 1409.2329, for the
places of dropout; Press & Wolf, Using the Output Embedding to Improve Language Models, EACL 2017, arXiv 1608.05859,
for the tied decoder.
"""

from torch import Tensor, nn

from models.registry import positive, probability, register

Carry = tuple[Tensor, Tensor]  # the hidden and the cell states, (num_layers, batch, hidden) each
INITIAL_RANGE = 0.1  # of embedding and decoder in PyTorch's word language model


class LanguageModel(nn.Module):
    """Words to logits of the next words; dropout behind the embedding, between the layers and before the decoder."""

    def __init__(self, *, num_words: int, hidden: int, num_layers: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, hidden)
        self.lstm = nn.LSTM(
            hidden,
            hidden,
            num_layers,
            batch_first=True,
            dropout=dropout if num_layers > 1 else 0.0,  # with one layer there is nowhere to put it, and torch warns
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
            carry: what the steps before returned, or None at the beginning of the text.
        """
        outputs, carry = self.lstm(self.dropout(self.embedding(words)), carry)
        return self.decoder(self.dropout(outputs)), carry


@register("text")
def lstm(
    *, num_words: int, hidden: int = 650, num_layers: int = 3, dropout: float = 0.4, tied: bool = True
) -> nn.Module:
    """The LSTM that the studies of MiCRO's authors train on WikiText-2.

    28,949,319 parameters for 28,869 words, the count of the authors' scripts; 31,819,578 for the 33,278 words of
    WikiText-2's vocabulary.

    Args:
        hidden: width of the embedding and of every layer.
        dropout: share of values set to zero in training.
        tied: let the decoder share the embedding's weight.

    Initialised as the word language model of PyTorch's examples: embedding and decoder uniform in +-0.1, the decoder's
    bias zero, the layers as `torch.nn.LSTM` is.

    Raises:
        ValueError: a setting out of range.
    """
    positive(hidden=hidden, num_layers=num_layers)
    probability(dropout=dropout)
    if not isinstance(tied, bool):
        raise ValueError(f"tied must be true or false, got {tied!r}")
    return LanguageModel(num_words=num_words, hidden=hidden, num_layers=num_layers, dropout=dropout, tied=tied)
