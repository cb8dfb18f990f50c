"""Download, verify and unpack a data set, or take it from a folder that already holds it.

    python -m data.prepare --list
    python -m data.prepare cifar10 [--root data/cache] [--url URL]
    python -m data.prepare wikitext2 --from DIR
    python -m data.prepare imagenet --from DIR [--size 256]

A set appears in the root when it is complete. Until then its files are in the root's ``.prepare``; an archive that was
downloaded completely is used again.
"""

import argparse
import difflib
import errno
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, TextIO, cast

from filelock import FileLock, Timeout
from tqdm import tqdm

from data import imagenet
from data.catalogue import CATALOGUE, Archive, Entry
from data.checksums import check_unchanged, checksum_of, record, verdict
from data.convert import Report, convert
from data.download import download
from data.file_sums import sums_of
from data.source import shortened
from data.unpack import unpack

IMAGENET_ABOUT = "about 1.28 million photographs in 1,000 classes, to be had on request; www.image-net.org"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line on what is wrong, or 130 after an interrupt.

    If standard output cannot be written, return 141 if its reader has ended, as ``head`` does, otherwise 1.
    """
    _open_streams()
    try:
        code = _exit_code(words)
        sys.stdout.flush()
        return code
    except SystemExit:  # after --help
        if error := _drop_output():
            return _output_failed(error)
        raise
    except OSError as error:
        return _output_failed(_drop_output() or error)


def _exit_code(words: Sequence[str] | None) -> int:
    try:
        given = _parser().parse_args(words)
        try:
            _run(given)
        except OSError as error:
            if isinstance(error, BrokenPipeError) or _is_broken(sys.stdout):
                raise
            return _fail(_disk_error(error, given.root), 2)
    except ValueError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted: run again to go on", 130)
    return 0


def names() -> list[str]:
    """Return what can be prepared."""
    return [*CATALOGUE, imagenet.FOLDER]


def prepare(entry: Entry, root: Path, *, origin: Path | None = None, url: str | None = None) -> None:
    """Put a data set into root, if it is not there, and verify it.

    Args:
        entry: of the catalogue.
        root: the data root; made if need be.
        origin: a folder that holds the archives, or the set's unpacked files; None downloads.
        url: where to download from instead: an archive, or with ``/`` at its end the folder that holds them.
    Raises:
        ValueError: it cannot be downloaded or found, its checksum is wrong, or what is there has changed.
        OSError: it cannot be written.
    """
    target = root / entry.folder
    if target.is_dir():
        unchanged = ", as it was prepared" if check_unchanged(target) else ", not by this command"
        _say(entry.name, f"is already in {target}{unchanged}")
        _say_verdict(entry, target)
        return
    with _work_folder(root, entry.name) as work:
        staged = _emptied(work / "unpacked")
        if origin is None:
            _download_all(entry, work, staged, url)
        else:
            _copy_from(entry, origin, staged)
        record(entry, staged / entry.folder)
        # Until this step nothing of the set is in the root.
        (staged / entry.folder).rename(target)
        shutil.rmtree(work)
    _say(entry.name, f"is ready in {target}")
    _say_verdict(entry, target)


def prepare_imagenet(root: Path, *, origin: Path | None, size: int, processes: int) -> None:
    """Convert the folders train and val of origin into root; raise as `prepare` does."""
    target = root / imagenet.FOLDER
    if target.is_dir():
        sums_of(target, imagenet.files_in(target))
        imagenet.ImageNet(image_size=1).check(str(root))
        _say("imagenet", f"is already in {target}, with files of the right form")
        return
    if origin is None:
        raise ValueError("imagenet cannot be downloaded: give --from DIR, DIR holding train/CLASS/* and val/CLASS/*")
    with _work_folder(root, "imagenet") as work:
        converted = work / "converted"
        converted.mkdir(exist_ok=True)
        with _progress("imagenet") as report:
            others = convert(origin, converted, size=size, processes=processes, report=report)
        sums_of(converted, imagenet.files_in(converted))  # only once: a start compares sizes and times
        converted.rename(target)
        shutil.rmtree(work)
    _say("imagenet", f"is ready in {target}")
    if others:
        _say("imagenet", f"leaves out {shortened(others)}: no images")


class _Parser(argparse.ArgumentParser):
    """Read a command line; a mistake raises ValueError instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m data.prepare", description="Put a data set into the data root.")
    parser.add_argument("name", nargs="?", help=f"one of {', '.join(names())}")
    parser.add_argument("--list", action="store_true", help="list what can be prepared and what is there")
    parser.add_argument("--root", type=_folder, default=Path("data/cache"), help="the data root (default: %(default)s)")
    parser.add_argument("--from", dest="origin", type=_folder, help="folder with the archives, or the unpacked files")
    parser.add_argument("--url", help="download from here instead; with / at its end, the folder of the archives")
    parser.add_argument("--size", type=int, default=256, help="imagenet: side of the stored images (default: 256)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="imagenet: processes that decode")
    return parser


def _folder(text: str) -> Path:
    return Path(text).expanduser()


def _run(given: argparse.Namespace) -> None:
    if given.list:
        _list(given.root)
        return
    if given.name is None:
        raise ValueError(f"name one of {', '.join(names())}")
    if given.name not in names():
        close = difflib.get_close_matches(given.name, names(), n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"name must be one of {', '.join(names())}, got '{given.name}'{hint}")
    for option in ("size", "processes"):
        if getattr(given, option) < 1:
            raise ValueError(f"--{option} must be at least 1, got {getattr(given, option)}")
    if given.origin is not None and not given.origin.is_dir():
        raise ValueError(f"--from must name a folder, got '{given.origin}'")
    if given.origin is not None and given.url is not None:
        raise ValueError("--from and --url exclude each other: give one")
    given.root.mkdir(parents=True, exist_ok=True)
    if given.name in CATALOGUE:
        prepare(CATALOGUE[given.name], given.root, origin=given.origin, url=given.url)
    else:
        prepare_imagenet(given.root, origin=given.origin, size=given.size, processes=given.processes)


def _list(root: Path) -> None:
    folders = {name: entry.folder for name, entry in CATALOGUE.items()} | {imagenet.FOLDER: imagenet.FOLDER}
    abouts = {name: entry.about for name, entry in CATALOGUE.items()} | {imagenet.FOLDER: IMAGENET_ABOUT}
    for name in names():
        state = "there" if (root / folders[name]).is_dir() else "-"
        print(f"{name:<15} {state:<6} {abouts[name]}")


# Download, or copy from a folder


def _download_all(entry: Entry, work: Path, staged: Path, url: str | None) -> None:
    for archive in entry.archives:
        source, path = _url_of(entry, archive, url), work / archive.name
        try:
            download(source, path, archive.checksum)
        except ValueError as error:
            remedy = f"run again, name another place with --url, or get {path.name} by other means and use --from DIR"
            raise ValueError(f"{error}; {remedy}") from error
        _say(entry.name, f"was downloaded: {archive.name} has the published checksum {archive.checksum}")
        _open(entry, path, staged)


def _url_of(entry: Entry, archive: Archive, url: str | None) -> str:
    if url is None:
        return archive.url
    if url.endswith("/"):
        return url + archive.name
    if len(entry.archives) > 1:
        files = ", ".join(one.name for one in entry.archives)
        raise ValueError(f"--url of {entry.name} must end with / and name the folder that holds {files}, got '{url}'")
    return url


def _open(entry: Entry, archive: Path, staged: Path) -> None:
    """Unpack an archive, or put a plain file in its place."""
    if archive.suffix == ".txt":
        (staged / entry.folder).mkdir(exist_ok=True)
        shutil.copyfile(archive, staged / entry.folder / archive.name)
        return
    unpack(archive, staged)
    lacking = [file.name for file in entry.files if not (staged / entry.folder / file.name).is_file()]
    if lacking:
        raise ValueError(f"{archive} must hold {entry.folder}/{lacking[0]}, and does not")


def _copy_from(entry: Entry, origin: Path, staged: Path) -> None:
    """Copy a set from a folder: unpack its archive, or copy the unpacked files."""
    archives = [origin / archive.name for archive in entry.archives]
    if archives[0].suffix != ".txt" and archives[0].is_file():
        found, published = checksum_of(archives[0], entry.archives[0].checksum), entry.archives[0].checksum
        if found != published:
            raise ValueError(f"{archives[0]} must have the published checksum {published}, got {found}: get it again")
        _open(entry, archives[0], staged)
        return
    for folder in (origin / entry.folder, origin):
        if _copy(entry, folder, staged / entry.folder):
            return
    wanted = ", ".join(file.name for file in entry.files)
    raise ValueError(f"{origin} must hold {archives[0].name} or {entry.folder} with {wanted}, and does not")


def _copy(entry: Entry, folder: Path, target: Path) -> bool:
    """Copy the set's files that are in ``folder``; return whether there was one."""
    there = {file.name: path for file in entry.files if (path := file.found_in(folder))}
    for name, path in there.items():
        target.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)
    return bool(there)


# Folders


@contextmanager
def _work_folder(root: Path, name: str) -> Iterator[Path]:
    """Yield the folder for incomplete files, to one process at a time."""
    work = root / ".prepare" / name
    work.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / ".prepare" / f"{name}.lock", blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"another process is preparing {name} in {root}: wait for it") from error
    try:
        yield work
    finally:
        lock.release()


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


# Output


@contextmanager
def _progress(label: str) -> Iterator[Report]:
    """Yield a function that shows the progress: a bar on a terminal, otherwise a line per minute."""
    terminal = sys.stderr.isatty()
    with tqdm(desc=label, mininterval=0.1 if terminal else 60, maxinterval=60) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report


def _say_verdict(entry: Entry, folder: Path) -> None:
    for line in verdict(entry, folder):
        _say(entry.name, line)


def _say(name: str, what: str) -> None:
    print(f"{name} {what}", flush=True)


def _fail(line: str, code: int) -> int:
    print(f"data.prepare: {' '.join(line.split())}", file=sys.stderr)
    return code


def _open_streams() -> None:
    """Open missing standard streams (``>&-``) on the null device."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, _nothing())
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # letters that the encoding lacks become question marks


def _is_broken(output: TextIO) -> OSError | None:
    """Return why an output cannot be written, or None."""
    try:
        output.flush()
    except OSError as error:
        return error
    return None


def _drop_output() -> OSError | None:
    """Drop buffered standard output, which Python would write at its end; return why it cannot be written."""
    if error := _is_broken(sys.stdout):
        sys.stdout = _nothing()
    return error


def _nothing() -> TextIO:
    return cast(TextIO, open(os.devnull, "w"))  # stays open until the process ends


def _output_failed(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):
        return 141
    return _fail(f"cannot write to standard output: {error.strerror or error}", 1)


def _disk_error(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left under {root}: free some, or choose another place with --root"
    return f"{error.filename or root} cannot be read or written ({error.strerror or error})"


if __name__ == "__main__":
    sys.exit(main())
