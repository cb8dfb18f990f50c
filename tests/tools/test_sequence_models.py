"""The models of words and of interactions, against what their papers write."""

import pytest
import torch
from torch import Tensor

import models
from tests.tools.test_models import LANGUAGE, SIZES, WORDS, logits, small


def changed_from(place: int) -> Tensor:
    """The words, other ones from a place on."""
    words = WORDS.clone()
    words[:, place:] = (words[:, place:] + 1) % 11
    return words


@pytest.mark.parametrize("name", ["lstm", "cnn_lstm"])
def test_two_halves_with_the_carry_are_the_whole(name: str) -> None:
    model = small(name).eval()
    whole, end = model(WORDS, None)
    first, carry = model(WORDS[:, :2], None)
    second, last = model(WORDS[:, 2:], carry)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(last, end)
    assert not torch.allclose(model(WORDS[:, 2:], None)[0], second)


@pytest.mark.parametrize("name", [*LANGUAGE, "bert_base"])
def test_a_word_sees_its_own_row_and_in_language_models_none_to_come(name: str) -> None:
    model = small(name).eval()
    before, after = logits(name, model), logits(name, model, changed_from(3))
    torch.testing.assert_close(logits(name, model, WORDS[:1]), before[:1])
    assert not torch.allclose(after[:, 3], before[:, 3])
    assert torch.allclose(after[:, :3], before[:, :3]) == (name != "bert_base")


@pytest.mark.parametrize(
    ("name", "embedding", "decoder"),
    [
        ("lstm", "embedding", "decoder"),
        ("bert_base", "network.bert.embeddings.word_embeddings", "network.cls.predictions.decoder"),
    ],
)
def test_a_tied_weight_is_one_parameter(name: str, embedding: str, decoder: str) -> None:
    model, copied = small(name).eval(), small(name, seed=1).eval()
    assert model.get_parameter(f"{embedding}.weight") is model.get_parameter(f"{decoder}.weight")
    copied.load_state_dict(model.state_dict())
    assert torch.equal(logits(name, copied), logits(name, model))


def test_letters_are_read_as_the_paper_writes_it() -> None:
    from models.cnn_lstm import ARCHITECTURES, WordReader

    torch.manual_seed(0)
    reader, letters = WordReader(6, ARCHITECTURES["tiny"]).double(), torch.tensor([[1, 4, 5, 3], [1, 2, 0, 0]])
    highway = reader.highways[0]
    for word, vector in zip(letters, reader(letters), strict=True):
        columns = torch.stack([reader.embedding.weight[letter] for letter in word])
        features = []
        for convolution in reader.convolutions:
            width = convolution.weight.shape[2]
            windows = [columns[start : start + width].T for start in range(4 - width + 1)]
            values = [torch.tanh((convolution.weight * window).sum((1, 2)) + convolution.bias) for window in windows]
            features.append(torch.stack(values).max(dim=0).values)
        read = torch.cat(features)
        gate = torch.sigmoid(highway.gate.weight @ read + highway.gate.bias)
        changed = torch.relu(highway.change.weight @ read + highway.change.bias)
        torch.testing.assert_close(vector, gate * changed + (1 - gate) * read)
    assert torch.equal(reader(torch.tensor([[3]])), reader(torch.tensor([[3, 0, 0]])))  # padded to the widest


def test_spelling_is_of_the_data_and_says_all_of_a_word() -> None:
    fresh = models.build("cnn_lstm", sizes=SIZES, size="tiny")
    assert not fresh.get_buffer("spelling").any()
    assert "spelling" not in fresh.state_dict()
    model = small("cnn_lstm").eval()
    model.get_buffer("spelling")[7] = model.get_buffer("spelling")[2]
    seven, two, three = (model(torch.tensor([[1, word]]), None)[0] for word in (7, 2, 3))
    torch.testing.assert_close(seven, two)
    assert not torch.allclose(seven, three)


def test_the_character_models_padding_stays_zero() -> None:
    model = small("cnn_lstm")
    padding = model.get_parameter("reader.embedding.weight")
    assert not padding[0].any()
    model.get_buffer("spelling")[:, 3] = 0
    logits("cnn_lstm", model).square().sum().backward()
    assert padding.grad is not None
    assert padding.grad.any(dim=1).tolist() == [False, *[True] * (len(padding) - 1)]


def test_neumf_joins_a_product_and_a_perceptron() -> None:
    model = small("neumf").eval()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    users, items = torch.tensor([0, 4, 4]), torch.tensor([6, 0, 3])
    for user, item, logit in zip(users, items, model(users.int(), items.int()), strict=True):
        product = weights["user_factors.weight"][user] * weights["item_factors.weight"][item]
        pair = torch.cat([weights["user_features.weight"][user], weights["item_features.weight"][item]])
        layer = torch.relu(weights["perceptron.0.0.weight"] @ pair + weights["perceptron.0.0.bias"])
        expected = weights["head.weight"][0] @ torch.cat([product, layer]) + weights["head.bias"][0]
        torch.testing.assert_close(logit, expected)


def test_positions_by_rotation_depend_on_distances_alone() -> None:
    from models.gpt import rotated

    drawn = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key = (rotated(vector.expand(1, 1, 7, 8)) for vector in drawn)
    products = (query @ key.transpose(2, 3))[0, 0]
    for distance in range(4):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
