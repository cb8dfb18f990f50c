"""BERT: a transformer encoder that predicts masked words from both sides.

Source: Devlin, Chang, Lee & Toutanova, BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding, NAACL 2019, arXiv 1810.04805.
"""

from torch import Tensor, nn

from models.registry import positive, probability, register


class MaskedLanguageModel(nn.Module):
    """Maps words to logits at each position: wraps a network of transformers to use plain tensors."""

    def __init__(self, network: nn.Module, max_length: int) -> None:
        super().__init__()
        self.network = network
        self.max_length = max_length

    def forward(self, words: Tensor) -> Tensor:
        """Map (batch, steps) int64 words to (batch, steps, num_words) logits.

        Raises:
            ValueError: more steps than there are positions.
        """
        if words.shape[1] > self.max_length:
            raise ValueError(
                f"bert_base was built for at most {self.max_length} words in a row, got {words.shape[1]}: "
                "raise max_length or shorten the rows"
            )
        return self.network(words).logits


@register("masked_text")
def bert_base(
    *,
    num_words: int,
    hidden: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    intermediate: int = 3072,
    max_length: int = 128,
    dropout: float = 0.1,
) -> nn.Module:
    """BERT-base with its masked-word head, whose decoder shares the word embedding's weight.

    109,514,298 parameters for the paper's 30,522 word pieces and 512 positions, 109,219,386 for 128 positions.

    Args:
        hidden: width of the embeddings and of every layer.
        intermediate: width inside a layer's feed-forward part.
        max_length: number of learnt positions, the longest row.
        dropout: share of values and of attention weights set to zero in training.

    Differences from the paper: no next-sentence head, nor layers that only it needs; all rows have the first segment's
    embedding. There is no padding: every row is full.

    Raises:
        ValueError: a setting out of range, or transformers is not installed.
    """
    positive(hidden=hidden, num_layers=num_layers, num_heads=num_heads)
    positive(intermediate=intermediate, max_length=max_length)
    probability(dropout=dropout)
    if hidden % num_heads:
        raise ValueError(f"hidden must be a multiple of num_heads, got {hidden} and {num_heads}")
    try:
        from transformers import BertConfig, BertForMaskedLM
    except ImportError as error:  # the library or one of its dependencies
        reason = str(error).splitlines()[0]
        raise ValueError(f"model bert_base needs transformers: pip install transformers ({reason})") from None
    config = BertConfig(
        vocab_size=num_words,
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=intermediate,
        max_position_embeddings=max_length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=None,  # the default, 0, would exclude word 0 from training
    )
    return MaskedLanguageModel(BertForMaskedLM(config), max_length)
