"""Patches of weights: apply(diff(old, new)) makes old new, bit for bit; all else is refused, and nothing changes."""

import copy
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from micro import patches
from tests.refusals import refused

Weights = dict[str, Tensor]
KINDS = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex128 complex64"
FP8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
DTYPES = [getattr(torch, name) for name in (*KINDS.split(), *FP8)]


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Return a tensor of random bits: of all its values NaNs with payloads, infinities, zeros of either sign."""
    draw = torch.Generator().manual_seed(seed)
    numel = int(torch.tensor(shape).prod()) * dtype.itemsize
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (numel,), generator=draw, dtype=torch.uint8)
    return content.view(dtype).view(shape)


def changed(tensor: Tensor, share: float) -> Tensor:
    """Return a copy of a contiguous tensor that has other bits in a share of its elements."""
    rows = tensor.reshape(-1).clone().view(torch.uint8).view(tensor.numel(), tensor.element_size())
    chosen = torch.randperm(len(rows))[: round(share * len(rows))]
    rows[chosen] ^= 1
    return rows.view(-1).view(tensor.dtype).view(tensor.shape)


def as_bits(weights: Weights) -> dict[str, tuple[torch.dtype, torch.Size, list[int]]]:
    whole = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    return {name: (each.dtype, each.shape, each.untyped_storage().tolist()) for name, each in whole.items()}


def pair() -> tuple[Weights, Weights]:
    """Return two versions of small weights in four forms of memory."""
    torch.manual_seed(0)
    old = {
        "wide": torch.randn(7, 9).bfloat16(),
        "bias": torch.randn(5),
        "steps": torch.tensor(3),
        "none": torch.ones(0),
    }
    new = {name: changed(tensor, 0.4) for name, tensor in old.items()}
    return old, new | {"steps": torch.tensor(-4)}


def refused_whole(weights: Weights, call: Callable[[], object], *parts: Any) -> None:
    """Check that a call is refused, and that no bit of the weights has changed."""
    before = as_bits(weights)
    refused(call, *parts)
    assert as_bits(weights) == before


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_old_becomes_new_bit_for_bit_through_a_file(dtype: torch.dtype, share: float, tmp_path: Path) -> None:
    base = {
        "flat": drawn(dtype, 300),
        "none": drawn(dtype, 0),
        "one": drawn(dtype, 1).view(()),
        "row": drawn(dtype, 1, 6),
    }
    old = base | {"turned": drawn(dtype, 8, 40, seed=1).t(), "part": drawn(dtype, 20, 9, seed=2)[::3, 1:5]}
    new = {name: changed(tensor.contiguous(), share) for name, tensor in old.items()}
    patch, expected = patches.diff(old, new), as_bits(new)
    patches.save(patch, tmp_path / "weights.patch")
    loaded = patches.load(tmp_path / "weights.patch")
    assert loaded == patch
    assert (tmp_path / "weights.patch").stat().st_size == patch.num_bytes
    assert [each.name for each in tmp_path.iterdir()] == ["weights.patch"]
    patches.apply_(old, loaded)
    assert as_bits(old) == expected
    assert patches.digest(old) == patches.digest(new) == patch.result
    assert patch.numel == sum(tensor.numel() for tensor in old.values())
    parts = 2 if dtype.is_complex else 1
    assert patch.num_changed == parts * sum(round(share * tensor.numel()) for tensor in old.values())


def test_differences_that_compression_leaves_as_long_as_they_are() -> None:
    for numel, values in product(range(10, 24), range(2, 12)):
        old = {"x": torch.zeros(numel, dtype=torch.int8)}
        new = {"x": (torch.arange(numel).square() % values + 1).to(torch.int8)}
        patches.apply_(old, patches.diff(old, new))
        assert torch.equal(old["x"], new["x"])


def test_zeros_of_either_sign_and_payloads_of_nan_are_other_weights() -> None:
    for one, other in ([0.0], [-0.0]), ([float("nan")], [-float("nan")]):
        old, new = {"x": torch.tensor(one)}, {"x": torch.tensor(other)}
        assert patches.digest(old) != patches.digest(new)
        patches.apply_(old, patches.diff(old, new))
        assert as_bits(old) == as_bits(new)


def test_small_steps_take_two_bytes_an_element_at_most_and_large_tensors_several_pieces() -> None:
    """One in a hundred weights moves by a unit in its last place; the tensor is longer than a piece of 2^24."""
    torch.manual_seed(0)
    numel = (1 << 24) + 10_000
    old = {"x": torch.randn(1000).bfloat16().repeat(numel // 1000 + 1)[:numel]}
    new = {"x": old["x"].clone()}
    new["x"].view(torch.int16)[50::100] += torch.tensor([1, -1], dtype=torch.int16).repeat(numel // 200 + 1)[
        : numel // 100
    ]
    patch = patches.diff(old, new)
    assert patch.num_changed == numel // 100
    assert len(patch.tensors[0].pieces) == 2
    assert patch.num_bytes < 2 * patch.num_changed
    patches.apply_(old, patch)
    assert torch.equal(old["x"].view(torch.int16), new["x"].view(torch.int16))


def test_a_model_is_brought_up_to_date_in_place_with_tied_parameters() -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6))
        net[2].weight = net[0].weight
        return net

    trained, served = network(), network()
    old = copy.deepcopy(trained.state_dict())
    with torch.no_grad():
        trained[0].weight += 0.1
        trained[1].weight.neg_()
    patch = patches.diff(old, trained.state_dict())
    patches.apply_(served.state_dict(), patch)
    assert torch.equal(served(torch.arange(6)), trained(torch.arange(6)))
    assert served[2].weight is served[0].weight
    of_parameters = network()
    patches.apply_(dict(of_parameters.named_parameters(remove_duplicate=False)), patch)
    assert torch.equal(of_parameters[1].weight, trained[1].weight)


def test_memory_that_is_shared_where_the_patch_was_made_without_is_refused() -> None:
    old, new = {"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": torch.ones(4), "b": -torch.ones(4)}
    tied = dict.fromkeys(old, torch.zeros(4))
    refused_whole(tied, lambda: patches.apply_(tied, patches.diff(old, new)), "share memory")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda w: w.pop("bias"), ["bias", "float32 (5,)", "none"]),
        (lambda w: w.update(more=torch.ones(2)), ["more", "none", "float32 (2,)"]),
        (lambda w: w.update(bias=w["bias"].double()), ["bias", "float64"]),
        (lambda w: w.update(wide=w["wide"].t()), ["wide", "(9, 7)"]),
        (lambda w: w.update(extra="words"), ["extra"]),
        (lambda w: w.update(bias=torch.ones(5, device="meta")), ["bias", "dense"]),
        (lambda w: w.update(bias=torch.ones(5).to_sparse()), ["bias", "dense"]),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change: Callable[[Any], object], parts: list[str]) -> None:
    old, new = pair()
    patch, wrong = patches.diff(old, new), dict(old)
    change(wrong)
    before = as_bits(old)
    refused(lambda: patches.apply_(wrong, patch), *parts)
    refused(lambda: patches.diff(old, wrong), *parts)
    assert as_bits(old) == before


def test_a_patch_is_refused_twice_and_for_other_weights() -> None:
    old, new = pair()
    patch = patches.diff(old, new)
    refused_whole(new, lambda: patches.apply_(new, patch), "applied before", patch.base[:12])
    other = {name: changed(tensor, 0.2) for name, tensor in old.items()}
    refused_whole(other, lambda: patches.apply_(other, patch), patch.base[:12], patches.digest(other)[:12])
    back = patches.diff(new, old)
    patches.apply_(old, patch)
    patches.apply_(old, back)
    assert patches.digest(old) == patch.base


def test_a_torn_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.patch"
    patches.save(patches.diff(*pair()), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        refused(lambda: patches.load(path), str(path))
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        refused(lambda: patches.load(path), str(path))
    for content in (whole + b"\0", whole + whole, b"PK\3\4" + whole):
        path.write_bytes(content)
        refused(lambda: patches.load(path), str(path))


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    patch = patches.diff(*pair())
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        patches.save(patch, tmp_path / "folder")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_files_of_safetensors_are_compared_and_brought_up_to_date(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    old, new = pair()
    first, second = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    files.save_file(old, first, {"format": "pt"})
    files.save_file(new, second)
    patch = patches.diff(first, second)
    assert patch == patches.diff(old, new)
    patches.apply_(first, patch)
    assert as_bits(files.load_file(first)) == as_bits(new)
    with sys.modules["safetensors"].safe_open(first, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    before = first.read_bytes()
    refused(lambda: patches.apply_(first, patch), "applied before")
    assert first.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new.safetensors", "old.safetensors"]


def test_files_of_weights_without_the_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(lambda: patches.diff("a.safetensors", "b.safetensors"), "safetensors", error=ImportError)
