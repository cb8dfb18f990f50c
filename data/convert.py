"""Decode a folder of images once, into files that can be memory-mapped."""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.folder_files import files_below
from data.imagenet import SPLITS

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

Report = Callable[[int, int], None]  # called with the number of finished images, and of all
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision's ImageFolder
START_METHOD = "spawn"  # not fork: this process may have threads, which a forked one lacks
BLOCK = 1 << 24  # bytes per write
CHUNK = 128  # images per report of a process; after a crash an unfinished chunk is decoded again


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some images of a split, and the rows of the array that they are written to.

    Attributes:
        source: folder of the split.
        names: of the files in it, with the class in front.
        images: the .npy file, which exists.
        start: row of the first image.
        mark: the line that says that its pixels are in the file; other files, or changed ones, have another.
    """

    source: Path
    names: tuple[str, ...]
    images: Path
    start: int
    mark: str


def convert(source: Path, folder: Path, *, size: int, processes: int = 1, report: Report | None = None) -> list[str]:
    """Convert source/train/CLASS/* and source/val/CLASS/* to arrays in folder; continue where an earlier call stopped.

    The folders in that of a class are part of it.

    Writes ``train_images.npy`` (num, 3, size, size) uint8, ``train_labels.npy`` (num,) int64, the same for val, and
    ``classes.json``. Images are in the order of their paths; a class's label is its place among the sorted folders.

    Args:
        source: holds the folders train and val.
        folder: of the arrays; images that an earlier call wrote at this size from the same files are kept.
        size: side of the stored images: the shorter side is resized to it, the longer one cropped at both ends.
        processes: number of processes that decode; with 1, this process decodes.
        report: called with the number of images that are done, and of all.
    Returns:
        What else lies in source/train and source/val and was left out; hidden files are not named.
    Raises:
        ValueError: source has another layout or a class without images, an image cannot be decoded, or Pillow is not
            installed.
        OSError: the files cannot be written.
    """
    _require_pillow()
    classes, listings, others = _look(source)
    plan = _plan(listings, size)
    if not (folder / "plan").is_file() or (folder / "plan").read_text() != plan:
        _begin(folder, listings, classes, size)
        (folder / "plan").write_text(plan)
    total = sum(len(names) for names in listings.values())
    _decode_all(_remaining(source, folder, listings), folder / "done", total, processes, report or _silent)
    for leftover in ("plan", "done"):
        (folder / leftover).unlink()
    return others


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ValueError(f"converting images needs Pillow ({error}): pip install pillow") from error


def _look(source: Path) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Return the sorted classes, each split's sorted ``CLASS/FILE`` names, and the other files."""
    found = {split: _list(source / split) for split in SPLITS}
    classes, _, _ = found["train"]
    strange = sorted(set(found["val"][0]) - set(classes))
    if strange:
        raise ValueError(f"{source / 'val'} must hold classes of train, got '{strange[0]}'")
    others = [f"{split}/{name}" for split, (_, _, names) in found.items() for name in names]
    return classes, {split: names for split, (_, names, _) in found.items()}, others


def _list(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the classes of a split, its images, and the other files."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder: --from must name a folder that holds train/CLASS/* and val/CLASS/*"
        )
    entries = _shown(folder)
    classes = [path for path in entries if path.is_dir()]
    names, others = [], [path.name for path in entries if not path.is_dir()]
    for inner in classes:
        files = sorted(files_below(inner))
        images = [path for path in files if path.suffix.lower() in SUFFIXES]
        if not images:
            raise ValueError(f"{inner} has no image ({', '.join(SUFFIXES)}): add one, or remove the class")
        names += [str(path.relative_to(folder)) for path in images]
        others += [str(path.relative_to(folder)) for path in files if path.suffix.lower() not in SUFFIXES]
    if not names:
        raise ValueError(f"{folder} must hold one folder per class with {', '.join(SUFFIXES)} files in it, got none")
    return [inner.name for inner in classes], names, others


def _shown(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _plan(listings: dict[str, list[str]], size: int) -> str:
    digest = hashlib.sha256(os.fsencode("\n".join("\n".join([split, *names]) for split, names in listings.items())))
    return f"{size} {digest.hexdigest()}\n"


def _begin(folder: Path, listings: dict[str, list[str]], classes: list[str], size: int) -> None:
    """Write everything but the pixels."""
    for old in ("plan", "done"):
        (folder / old).unlink(missing_ok=True)
    labels = {name: label for label, name in enumerate(classes)}
    for split, names in listings.items():
        _reserve(folder / f"{split}_images.npy", (len(names), 3, size, size))
        targets = np.array([labels[name.split("/")[0]] for name in names], dtype=np.int64)
        np.save(folder / f"{split}_labels.npy", targets)
    (folder / "classes.json").write_text(json.dumps(classes) + "\n")


def _reserve(path: Path, shape: tuple[int, ...]) -> None:
    """Create an array on disk and reserve its space, since a full disk would later kill the process."""
    begin, size = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape).offset, path.stat().st_size
    try:
        with path.open("r+b") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS: only written zeros take space
                file.seek(begin)
                for start in range(begin, size, BLOCK):
                    file.write(bytes(min(BLOCK, size - start)))
    except OSError:
        path.unlink()
        raise


def _remaining(source: Path, folder: Path, listings: dict[str, list[str]]) -> list[Chunk]:
    """Return the chunks that are not converted; forget the marks of other sources."""
    chunks = []
    for split, names in listings.items():
        images = folder / f"{split}_images.npy"
        for start in range(0, len(names), CHUNK):
            chosen = tuple(names[start : start + CHUNK])
            mark = f"{images.name} {start} {_digest(source / split, chosen)}\n"
            chunks.append(Chunk(source=source / split, names=chosen, images=images, start=start, mark=mark))
    done = _done(folder / "done")
    (folder / "done").write_text("".join(chunk.mark for chunk in chunks if chunk.mark in done))
    return [chunk for chunk in chunks if chunk.mark not in done]


def _done(path: Path) -> set[str]:
    """Return the finished chunks. A crash may leave a last line without newline, which does not count."""
    return (
        {line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")} if path.exists() else set()
    )


def _digest(folder: Path, names: tuple[str, ...]) -> str:
    """Return a digest of the folder's files, which changes if one is written again."""
    states = [(folder / name).stat() for name in names]
    known = [str(folder.resolve()), *((state.st_size, state.st_mtime_ns) for state in states)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _silent(done: int, total: int) -> None:
    """Report nothing."""


def _decode_all(chunks: list[Chunk], marks: Path, total: int, processes: int, report: Report) -> None:
    """Decode the remaining chunks, and mark each when its pixels are written."""
    done = total - sum(len(chunk.names) for chunk in chunks)
    report(done, total)
    with ExitStack() as stack:
        marked = stack.enter_context(marks.open("a"))
        for chunk in _decoded(chunks, processes, stack):
            marked.write(chunk.mark)
            marked.flush()
            done += len(chunk.names)
            report(done, total)


def _decoded(chunks: list[Chunk], processes: int, stack: ExitStack) -> Iterator[Chunk]:
    if processes == 1:
        yield from map(decode, chunks)
        return
    context = multiprocessing.get_context(START_METHOD)
    pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=context))
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    try:
        yield from pool.map(decode, chunks)
    except BrokenProcessPool as error:
        raise ValueError("a process that decodes images was killed, for want of memory perhaps: run again") from error


def decode(chunk: Chunk) -> Chunk:
    """Write a chunk's pixels into its file, and return it."""
    images = np.lib.format.open_memmap(chunk.images, mode="r+")
    for row, name in enumerate(chunk.names, chunk.start):
        images[row] = _pixels(chunk.source / name, images.shape[2])
    images.flush()
    return chunk


def _pixels(path: Path, size: int) -> np.ndarray:
    """Return (3, size, size) uint8 pixels of an image file."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            # Some files of ImageNet are grey, in CMYK, or PNG under another name.
            square = ImageOps.fit(_in_8_bits(image).convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be decoded ({error}): mend or remove it and run again") from error
    return np.asarray(square).transpose(2, 0, 1)


def _in_8_bits(image: "ImageFile") -> "Image":
    """Return the image with 8 bits per channel; Pillow itself would clip larger values at 255."""
    from PIL.Image import fromarray

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return fromarray((np.asarray(image) / 257).round().astype(np.uint8))  # 65535 = 257 * 255
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range")
    return image
