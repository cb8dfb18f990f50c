"""Neural matrix factorisation (NeuMF), which predicts how much a user likes an item.

Source: He, Liao, Zhang, Nie, Hu & Chua, Neural Collaborative Filtering, WWW 2017, arXiv 1708.05031, section 3.4.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from models.registry import positive, probability, register

EMBEDDING_STD = 0.01  # section 4.1


class NeuMF(nn.Module):
    """A product of factors and a perceptron, each with its own embeddings, combined by a linear layer.

    Initialised as in NVIDIA's implementation (DeepLearningExamples): embeddings normal, the perceptron by Glorot &
    Bengio's uniform rule, the last layer uniform in +-sqrt(3 / fan-in), biases as in `torch.nn.Linear`.
    """

    def __init__(self, *, num_users: int, num_items: int, factors: int, layers: Sequence[int], dropout: float) -> None:
        super().__init__()
        # The embeddings' gradients are dense, so a sparsifier selects among all rows.
        self.user_factors = nn.Embedding(num_users, factors)
        self.item_factors = nn.Embedding(num_items, factors)
        self.user_features = nn.Embedding(num_users, layers[0] // 2)
        self.item_features = nn.Embedding(num_items, layers[0] // 2)
        self.perceptron = nn.Sequential(*(_layer(before, after, dropout) for before, after in pairwise(layers)))
        self.head = nn.Linear(factors + layers[-1], 1)
        self._initialise_()

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Map (batch,) users and (batch,) items, int32 or int64, to (batch,) logits."""
        product = self.user_factors(users) * self.item_factors(items)
        features = torch.cat([self.user_features(users), self.item_features(items)], dim=1)
        return self.head(torch.cat([product, self.perceptron(features)], dim=1)).squeeze(1)

    def _initialise_(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=EMBEDDING_STD)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        bound = (3 / self.head.in_features) ** 0.5
        nn.init.uniform_(self.head.weight, -bound, bound)


@register("interactions")
def neumf(
    *,
    num_users: int,
    num_items: int,
    factors: int = 64,
    layers: Sequence[int] = (256, 256, 128, 64),
    dropout: float = 0.5,
) -> nn.Module:
    """Build NeuMF with the sizes of NVIDIA's implementation, which the authors of MiCRO train on MovieLens-20M.

    31,832,577 parameters for its 138,493 users and 26,744 items.

    Args:
        factors: width of the multiplied embeddings.
        layers: widths of the perceptron; the first is that of its input, the concatenated embeddings of user and item.
        dropout: share of values set to zero in training, after every layer of the perceptron.

    Differences from the paper: both halves are trained together from the start (paper: first separately); dropout.

    Raises:
        ValueError: a setting out of range.
    """
    positive(factors=factors)
    probability(dropout=dropout)
    _check_layers(layers)
    return NeuMF(num_users=num_users, num_items=num_items, factors=factors, layers=layers, dropout=dropout)


def _layer(before: int, after: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(before, after), nn.ReLU(inplace=True), nn.Dropout(dropout))


def _check_layers(layers: object) -> None:
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ValueError(f"layers must be a list of widths, got {layers!r}")
    positive(**{f"layers[{place}]": width for place, width in enumerate(layers)})
    if layers[0] % 2:
        raise ValueError(f"layers[0] must be even, half for the user and half for the item, got {layers[0]}")
