"""Create patches, and apply them completely or not at all."""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from micro.codecs.base import from_bytes
from micro.codecs.indices import Shortest
from micro.comm.objects import as_tensor
from micro.drivers.meeting import content_of
from micro.patches.patch import Change, Patch, replace
from micro.patches.weights import SPAN, Weights, bits, check_same, checked, digest_of, kind, safetensors, total

INDICES = Shortest()


def diff(old: Weights, new: Weights) -> Patch:
    """Return the patch that makes ``old`` ``new``, bit for bit: NaN payloads and the sign of zero too.

    Args:
        old: tensors by name, on any device. Not modified.
        new: with the same names, shapes and dtypes. Not modified.

    Raises:
        ValueError: a tensor is missing in one of them, differs in shape or dtype, or is not dense (meta, sparse,
            quantised, DTensor); the message names it.
        ImportError: a file is given, and safetensors is not installed.
    """
    before, after = checked(old, "old"), checked(new, "new")
    check_same({name: kind(tensor) for name, tensor in before.items()}, after, ("old", "new"))
    base = {name: digest_of(name, tensor) for name, tensor in before.items()}
    result, changes, body = dict(base), list[Change](), list[bytes]()
    for name, tensor in before.items():
        pieces = list(_encoded(bits(tensor), bits(after[name])))
        changed = any(count for count, *_ in pieces)
        if changed:
            result[name] = digest_of(name, after[name])
            body += [part for _, *parts in pieces for part in parts]
        lengths = ((count, len(differences)) for count, _, differences in pieces if changed)
        changes.append(Change(name, *kind(tensor), tuple(lengths)))
    return Patch(total(base), total(result), tuple(changes), b"".join(body))


def apply_(weights: Weights, patch: Patch) -> None:
    """Update weights in place from the patch's base to its result; or raise an error and change nothing.

    A file is replaced atomically. Tied tensors, which share memory, may have several names.

    Raises:
        ValueError: a tensor is missing, not in the patch, or of another shape or dtype (the message names it); or the
            weights are not the patch's base, for instance because it was already applied.
        ImportError: a file is given, and safetensors is not installed.
    """
    if not isinstance(weights, str | os.PathLike):
        applied(checked(weights, "weights"), patch)
        return
    package = safetensors()
    with package.safe_open(os.fspath(weights), "pt") as file:
        metadata = file.metadata()
    held = {
        name: tensor.clone() for name, tensor in checked(weights, "weights").items()
    }  # copies: the file is replaced
    applied(held, patch)
    replace(weights, lambda draft: package.torch.save_file(held, draft, metadata))


@torch.no_grad()
def applied(weights: Mapping[str, Tensor], patch: Patch) -> Callable[[], None]:
    """Apply a patch, or raise and change nothing; return a function that undoes it."""
    check_same({name: (dtype, shape) for name, dtype, shape, _ in patch.tensors}, weights, ("patch", "weights"))
    digests = {name: digest_of(name, tensor) for name, tensor in weights.items()}
    if (found := total(digests)) != patch.base:
        why = "the patch was applied before" if found == patch.result else "bring them to its base first"
        raise ValueError(f"the patch is for weights {patch.base[:12]}, these are {found[:12]}: {why}")
    writes = list(_writes(weights, patch))  # computed before the first write: tied tensors occur more than once

    def undo() -> None:
        for words, places, before, _ in writes:
            words.put_(places, before)

    try:
        for words, places, _, after in writes:
            words.put_(places, after)
        changed = (change.name for change in patch.tensors if change.pieces)
        digests |= {name: digest_of(name, weights[name]) for name in changed}
        if (found := total(digests)) != patch.result:
            raise ValueError("weights would not become the patch's result: some share memory that did not in its base")
    except BaseException:
        undo()
        raise
    return undo


def _encoded(old: Tensor, new: Tensor) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield for each SPAN words how many differ, their positions and the differences."""
    for before, after in zip(old.reshape(-1).split(SPAN), new.reshape(-1).split(SPAN), strict=True):
        before = before.to(after.device)
        places = (before != after).nonzero().view(-1)
        differences = (after[places] - before[places]).cpu()  # modulo the size of a word
        indices = INDICES.encode(places.int().cpu(), after.numel())
        yield places.numel(), content_of(indices), _compressed(_folded(differences))


def _writes(weights: Mapping[str, Tensor], patch: Patch) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield the words of a tensor, the positions to write, and the words there before and after."""
    wire, stop = as_tensor(patch.body), 0
    for change in patch.tensors:
        words = bits(weights[change.name])
        for first, (count, length) in zip(range(0, words.numel(), SPAN), change.pieces, strict=False):
            span = min(SPAN, words.numel() - first)
            start, middle = stop, stop + INDICES.num_bytes(count, span)
            stop = middle + length
            if count:
                places = INDICES.decode(wire[start:middle], count, span).long().add_(first).to(words.device)
                before = words.take(places)
                differences = _unfolded(_expanded(patch.body[middle:stop], count, words.dtype)).to(words.device)
                yield words, places, before, before + differences


def _folded(differences: Tensor) -> Tensor:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., so that small differences of either sign have zero upper bytes."""
    return differences << 1 ^ differences >> 8 * differences.element_size() - 1


def _unfolded(folded: Tensor) -> Tensor:
    return folded >> 1 & torch.iinfo(folded.dtype).max ^ -(folded & 1)


def _compressed(words: Tensor) -> bytes:
    """Return the first bytes of all words, then the second, and so on, compressed if that is shorter."""
    planes = content_of(words.view(torch.uint8).view(-1, words.element_size()).t())
    return min(planes, zlib.compress(planes, 1), key=len)  # of equal length: the first


def _expanded(wire: bytes, count: int, dtype: torch.dtype) -> Tensor:
    """Return the (count,) words from the output of `_compressed`."""
    size = count * dtype.itemsize
    planes = wire if len(wire) == size else zlib.decompressobj().decompress(wire, size)
    return from_bytes(as_tensor(planes).view(dtype.itemsize, -1).t().reshape(-1), dtype)
