"""The models of words and of interactions: their sizes, what they promise their callers, and their errors."""

import importlib.util
import sys

import pytest
import torch
from torch import Tensor, nn

import models

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="bert_base needs transformers, which is not installed"
)

PTB = {"num_words": 10_000, "num_characters": 51, "word_length": 21}
MOVIELENS = {"num_users": 138_493, "num_items": 26_744}
COUNTS = [
    ("lstm", {"num_words": 28_869}, {}, 28_949_319),
    ("lstm", {"num_words": 33_278}, {}, 31_819_578),
    ("lstm", {"num_words": 33_278}, {"tied": False}, 31_819_578 + 33_278 * 650),
    ("gpt", {"num_words": 50_257}, {}, 124_439_808),
    ("gpt", {"num_words": 256}, {"hidden": 512, "num_layers": 10, "num_heads": 8, "positions": "rope"}, 31_655_936),
    ("gpt", {"num_words": 256}, {"hidden": 384, "num_layers": 6, "num_heads": 6, "positions": "rope"}, 10_745_856),
    ("gpt", {"num_words": 256}, {"hidden": 128, "num_layers": 4, "num_heads": 4, "positions": "rope"}, 826_112),
    ("cnn_lstm", PTB, {}, 5_312_515),
    ("cnn_lstm", PTB, {"size": "large"}, 19_373_165),
    ("neumf", MOVIELENS, {}, 31_832_577),
    pytest.param("bert_base", {"num_words": 30_522}, {"max_length": 512}, 109_514_298, marks=needs_transformers),
    pytest.param("bert_base", {"num_words": 30_522}, {}, 109_219_386, marks=needs_transformers),
]

SMALL = {
    "lstm": {"hidden": 8, "num_layers": 2},
    "cnn_lstm": {"size": "tiny"},
    "gpt": {"hidden": 8, "num_layers": 2, "num_heads": 2, "max_length": 6},
    "neumf": {"factors": 4, "layers": [8, 6]},
    "bert_base": {"hidden": 8, "num_layers": 2, "num_heads": 2, "intermediate": 16, "max_length": 7},
}
SMALL_SIZES = {"num_words": 11, "num_characters": 6, "word_length": 4, "num_users": 5, "num_items": 7}
ALL = ["lstm", "cnn_lstm", "gpt", "neumf", pytest.param("bert_base", marks=needs_transformers)]
TEXT = ["lstm", "cnn_lstm"]


def small(name: str, *, seed: int = 0, **settings: object) -> nn.Module:
    torch.manual_seed(seed)
    model = models.build(name, sizes=SMALL_SIZES, **(SMALL[name] | settings))
    if name == "cnn_lstm":
        model.get_buffer("spelling").copy_(torch.randint(1, 6, (11, 4)))
    return model.double()


def small_words(rows: int = 3, steps: int = 6) -> Tensor:
    return torch.randint(0, 11, (rows, steps), generator=torch.Generator().manual_seed(0))


def logits(name: str, model: nn.Module) -> Tensor:
    if models.kind_of(name) == "interactions":
        return model(torch.tensor([0, 1, 4, 1]), torch.tensor([6, 6, 0, 3]))
    return model(small_words(), None)[0] if models.kind_of(name) == "text" else model(small_words())


@pytest.mark.parametrize(("name", "sizes", "settings", "numel"), COUNTS)
def test_parameter_count_is_that_of_the_docstring(
    name: str, sizes: dict[str, int], settings: dict[str, object], numel: int
) -> None:
    with torch.device("meta"):
        model = models.build(name, sizes=sizes, **settings)
    assert sum(parameter.numel() for parameter in model.parameters()) == numel


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_gets_a_dense_gradient(name: str) -> None:
    model = small(name)
    out = logits(name, model)
    assert out.shape == ((4,) if name == "neumf" else (3, 6, 11))
    out.square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.layout == torch.strided
        assert parameter.grad.any()


@pytest.mark.parametrize("name", ALL)
def test_weights_follow_the_seed(name: str) -> None:
    def weights(seed: int) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in small(name, seed=seed).parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


@pytest.mark.parametrize("name", ALL)
def test_dropout_follows_the_seed_and_is_off_in_evaluation(name: str) -> None:
    model = small(name, dropout=0.5)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return logits(name, model)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    model.eval()
    assert torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("name", TEXT)
def test_two_halves_with_the_carry_are_the_whole(name: str) -> None:
    model, words = small(name).eval(), small_words()
    whole, end = model(words, None)
    first, carry = model(words[:, :2], None)
    second, last = model(words[:, 2:], carry)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(last, end)
    assert all(state.shape[1] == 3 for state in end)
    assert not torch.allclose(model(words[:, 2:], None)[0], second)


@pytest.mark.parametrize("name", ["lstm", "cnn_lstm", "gpt", pytest.param("bert_base", marks=needs_transformers)])
def test_a_row_does_not_see_the_others(name: str) -> None:
    model, words = small(name).eval(), small_words()

    def row(batch: Tensor) -> Tensor:
        return model(batch)[0] if name == "bert_base" else model(batch, None)[0][0]

    torch.testing.assert_close(row(words[:1]), row(words))


@pytest.mark.parametrize("name", [*TEXT, "gpt"])
def test_a_language_model_does_not_see_the_words_to_come(name: str) -> None:
    model, words = small(name).eval(), small_words()
    changed = words.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 11
    before, after = model(words, None)[0], model(changed, None)[0]
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3], before[:, 3])


@pytest.mark.parametrize(
    ("name", "tied", "parameters"),
    [
        ("lstm", ("embedding.weight", "decoder.weight"), 1 + 8 + 1),
        pytest.param(
            "bert_base",
            ("network.bert.embeddings.word_embeddings.weight", "network.cls.predictions.decoder.weight"),
            42,
            marks=needs_transformers,
        ),
    ],
)
def test_a_tied_weight_is_one_parameter(name: str, tied: tuple[str, str], parameters: int) -> None:
    model = small(name)
    assert model.get_parameter(tied[0]) is model.get_parameter(tied[1])
    assert len(dict(model.named_parameters())) == parameters
    copied = small(name, seed=1)
    copied.load_state_dict(model.state_dict())
    assert torch.equal(logits(name, copied.eval()), logits(name, model.eval()))


def test_an_untied_decoder_is_a_parameter_of_its_own() -> None:
    model = small("lstm", tied=False)
    assert model.get_parameter("embedding.weight") is not model.get_parameter("decoder.weight")
    assert not torch.equal(model.get_parameter("embedding.weight"), model.get_parameter("decoder.weight"))


@pytest.mark.parametrize("tied", [True, False])
def test_the_lstm_starts_in_the_range_of_pytorchs_example(tied: bool) -> None:
    model = small("lstm", hidden=100, tied=tied)
    for name in ("embedding.weight", "decoder.weight"):
        weight = model.get_parameter(name)
        assert 0.095 < weight.max() < 0.1001
        assert -0.1001 < weight.min() < -0.095
    assert not model.get_parameter("decoder.bias").any()


@pytest.mark.filterwarnings("error")
def test_one_layer_has_no_dropout_between_layers() -> None:
    assert logits("lstm", small("lstm", num_layers=1)).shape == (3, 6, 11)


def test_words_of_one_spelling_read_the_same() -> None:
    model = small("cnn_lstm").eval()
    model.get_buffer("spelling")[7] = model.get_buffer("spelling")[2]
    seven, two, three = (model(torch.tensor([[1, word]]), None)[0] for word in (7, 2, 3))
    torch.testing.assert_close(seven, two)
    assert not torch.allclose(seven, three)


def test_letters_are_read_as_the_paper_writes_it() -> None:
    from models.cnn_lstm import ARCHITECTURES, WordReader

    torch.manual_seed(0)
    reader, letters = WordReader(6, ARCHITECTURES["tiny"]).double(), torch.tensor([[1, 4, 5, 3], [1, 2, 0, 0]])
    convolutions, highway = list(reader.convolutions), reader.highways[0]
    for word, vector in zip(letters, reader(letters), strict=True):
        columns = torch.stack([reader.embedding.weight[letter] for letter in word])
        features = []
        for convolution in convolutions:
            width = convolution.weight.shape[2]
            windows = [columns[start : start + width] for start in range(4 - width + 1)]
            values = [
                torch.tanh((convolution.weight * window.T).sum(dim=(1, 2)) + convolution.bias) for window in windows
            ]
            features.append(torch.stack(values).max(dim=0).values)
        read = torch.cat(features)
        gate = torch.sigmoid(highway.gate.weight @ read + highway.gate.bias)
        changed = torch.relu(highway.change.weight @ read + highway.change.bias)
        torch.testing.assert_close(vector, gate * changed + (1 - gate) * read)


def test_a_word_shorter_than_the_widest_convolution_is_padded() -> None:
    from models.cnn_lstm import ARCHITECTURES, WordReader

    reader = WordReader(6, ARCHITECTURES["tiny"])
    assert torch.equal(reader(torch.tensor([[3]])), reader(torch.tensor([[3, 0, 0]])))


def test_the_character_model_starts_in_the_papers_range_with_gates_shut() -> None:
    model = small("cnn_lstm")
    for name, parameter in model.named_parameters():
        if name.endswith("gate.bias"):
            assert (parameter == -2).all()
        else:
            assert 0 < parameter.abs().max() < 0.0501
    assert not model.get_parameter("reader.embedding.weight")[0].any()


def test_spelling_is_of_the_data_and_not_in_the_state() -> None:
    model = models.build("cnn_lstm", sizes=SMALL_SIZES, size="tiny")
    assert model.get_buffer("spelling").dtype == torch.int64
    assert not model.get_buffer("spelling").any()
    assert "spelling" not in model.state_dict()


def test_padding_stays_zero_in_training() -> None:
    model = small("cnn_lstm")
    model.get_buffer("spelling")[:, 3] = 0
    logits("cnn_lstm", model).square().sum().backward()
    gradient = model.get_parameter("reader.embedding.weight").grad
    assert gradient is not None
    assert not gradient[0].any()
    assert gradient[1:].any()


def test_neumf_is_a_product_beside_a_perceptron() -> None:
    model = small("neumf").eval()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    users, items = torch.tensor([0, 4, 4]), torch.tensor([6, 0, 3])
    for user, item, logit in zip(users, items, model(users, items), strict=True):
        product = weights["user_factors.weight"][user] * weights["item_factors.weight"][item]
        pair = torch.cat([weights["user_features.weight"][user], weights["item_features.weight"][item]])
        layer = torch.relu(weights["perceptron.0.0.weight"] @ pair + weights["perceptron.0.0.bias"])
        expected = weights["head.weight"][0] @ torch.cat([product, layer]) + weights["head.bias"][0]
        torch.testing.assert_close(logit, expected)


def test_neumf_takes_narrow_numbers_of_users_and_items() -> None:
    model, users, items = small("neumf").eval(), torch.tensor([0, 4]), torch.tensor([6, 1])
    assert torch.equal(model(users.int(), items.int()), model(users, items))


@needs_transformers
def test_bert_reads_both_sides_and_learns_every_word() -> None:
    model, words = small("bert_base").eval(), small_words()
    changed = words.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    assert not torch.allclose(model(words)[:, 0], model(changed)[:, 0])
    embedding = model.get_parameter("network.bert.embeddings.word_embeddings.weight")
    assert embedding[0].any()


@needs_transformers
def test_bert_names_its_longest_row() -> None:
    with pytest.raises(ValueError, match=r"at most 7 words in a row, got 8: raise max_length"):
        small("bert_base")(small_words(steps=8))


def test_bert_names_the_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"^model bert_base needs transformers: pip install transformers \("):
        small("bert_base")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("lstm", {"hidden": 0}, r"hidden must be an integer of at least 1, got 0"),
        ("lstm", {"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ("lstm", {"tied": 1}, r"tied must be true or false, got 1"),
        ("cnn_lstm", {"size": "huge"}, r"size must be one of tiny, small, large, got 'huge'"),
        ("cnn_lstm", {"dropout": "half"}, r"dropout must be in \[0, 1\), got 'half'"),
        ("neumf", {"layers": []}, r"layers must be a list of widths, got \[\]"),
        ("neumf", {"layers": 64}, r"layers must be a list of widths, got 64"),
        ("neumf", {"layers": [8, 0]}, r"layers\[1\] must be an integer of at least 1, got 0"),
        ("neumf", {"layers": [7, 4]}, r"layers\[0\] must be even, .*, got 7"),
        ("neumf", {"factors": 1.5}, r"factors must be an integer of at least 1, got 1.5"),
        ("bert_base", {"num_heads": 3}, r"hidden must be a multiple of num_heads, got 8 and 3"),
        ("bert_base", {"max_length": 0}, r"max_length must be an integer of at least 1, got 0"),
        ("bert_base", {"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
    ],
)
def test_a_mistake_is_told_in_one_line(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        small(name, **settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("lstm", "text and needs num_words"),
        ("cnn_lstm", "text and needs num_words"),
        ("bert_base", "masked_text and needs num_words"),
        ("neumf", "interactions and needs num_users"),
    ],
)
def test_a_model_says_which_size_the_data_lacks(name: str, missing: str) -> None:
    message = f"model '{name}' is for {missing}, the data set has in_channels, num_classes"
    with pytest.raises(ValueError, match=message):
        models.build(name, sizes={"in_channels": 1, "num_classes": 10})


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_gpt_sees_the_order_of_words(positions: str) -> None:
    model = small("gpt", positions=positions).eval()
    one, other = (model(torch.tensor([row]), None)[0][0, -1] for row in ([1, 2, 3, 4], [2, 1, 3, 4]))
    assert not torch.allclose(one, other, atol=1e-6)


def test_positions_by_rotation_depend_on_distances_alone() -> None:
    from models.gpt import rotated

    drawn = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key = (rotated(vector.expand(1, 1, 7, 8)) for vector in drawn)
    products = (query @ key.transpose(2, 3))[0, 0]
    for distance in range(4):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)


def test_the_gpts_last_map_is_its_embedding() -> None:
    model = small("gpt")
    assert len(dict(model.named_parameters())) == 2 + 2 * 12 + 2
    with torch.no_grad():
        model.get_parameter("norm.weight").zero_()
        model.get_parameter("norm.bias").fill_(1.0)
    torch.testing.assert_close(logits("gpt", model)[0, 0], model.get_parameter("embedding.weight").sum(1))


def test_a_gpt_refuses_what_does_not_fit() -> None:
    for settings, message in (
        ({"hidden": 10, "num_heads": 2}, "hidden must be a multiple of 2 num_heads, got 10 and 2"),
        ({"positions": "none"}, "positions must be one of learned, rope, got 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            small("gpt", **settings)
    with pytest.raises(ValueError, match="at most 6 words in a row, got 7"):
        small("gpt")(small_words(steps=7), None)
