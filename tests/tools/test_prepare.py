"""Data sets are downloaded, verified, unpacked and converted whole, or not at all."""

import errno
import hashlib
import io
import json
import shutil
import tarfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import data
from data import convert, file_sums, prepare, unpack
from data.catalogue import CATALOGUE, Archive, Entry, File
from data.download import download

CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()


# Downloads, from a server on this machine


@dataclass
class Site:
    """What the server offers, and how it misbehaves."""

    content: bytes = CONTENT
    breaks: list[int] = field(default_factory=list)  # bytes of an answer after which to break off, one per answer
    statuses: list[int] = field(default_factory=list)  # answered instead, one per request
    num_requests: int = 0
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site = self.site
        site.num_requests += 1
        if site.statuses:
            self.send_error(site.statuses.pop(0))
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(site.content)))
        self.end_headers()
        self.wfile.write(site.content[: site.breaks.pop(0)] if site.breaks else site.content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Handler,), {"site": site}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_address[1]}/file.bin"
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


def _sum(kind: str, content: bytes) -> str:
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


MD5 = _sum("md5", CONTENT)


def test_a_file_is_downloaded_whole_and_once(site: Site, tmp_path: Path) -> None:
    for _ in range(2):
        download(site.url, tmp_path / "file", MD5)
        assert (tmp_path / "file").read_bytes() == CONTENT
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert site.num_requests == 1


@pytest.mark.parametrize(
    ("misbehaviour", "message"),
    [
        ({"statuses": [404]}, r"file\.bin cannot be downloaded \(it answers 404 Not Found\)$"),
        ({"statuses": [503]}, r"it answers 503 Service Unavailable"),
        ({"breaks": [2000]}, r"cannot be downloaded \(.*2000 bytes read, 298000 more expected"),
        ({"content": b"other"}, rf"file\.bin gives a file whose checksum is not {MD5}, the published one$"),
    ],
)
def test_a_download_that_fails_leaves_nothing(
    site: Site, tmp_path: Path, misbehaviour: dict[str, Any], message: str
) -> None:
    for name, value in misbehaviour.items():
        setattr(site, name, value)
    with pytest.raises(ValueError, match=message):
        download(site.url, tmp_path / "file", MD5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://here/x", "here/x", "http://"])
def test_other_addresses_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match=r"url must begin with http:// or https://, got"):
        download(url, tmp_path / "file", MD5)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_an_error_of_the_disk(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.core.temporary_file", lambda path: nullcontext("/dev/full"))
    with pytest.raises(OSError, match="No space left on device") as caught:
        download(site.url, tmp_path / "file", MD5)
    assert caught.value.errno == errno.ENOSPC


# Archives


def _tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def _zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def _torn(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-40])
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: _torn(_tar(folder / "a.tar.gz", {"set/x": CONTENT})),
        lambda folder: _torn(_zip(folder / "a.zip", {"set/x": CONTENT})),
        lambda folder: Path(shutil.copy(__file__, folder / "a.tar.gz")),
        lambda folder: Path(shutil.copy(__file__, folder / "a.zip")),
        lambda folder: _tar(folder / "a.tar.gz", {"../outside": b"x"}),
    ],
)
def test_an_archive_that_is_torn_or_unsafe_is_named(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(ValueError, match=r"a\.(tar\.gz|zip) is torn"):
        unpack.unpack(make(tmp_path), tmp_path / "target")
    assert not (tmp_path / "outside").exists()


# The command, on a set that the test publishes


MEMBERS = {"set/a.dat": b"first", "set/b.dat": b"second", "set/README": b"read me"}


@pytest.fixture
def entry(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """Enter a set into the catalogue whose archive the server offers."""
    site.content = _tar(tmp_path / "published.tar.gz", MEMBERS).read_bytes()
    archive = Archive(url=site.url.replace("file.bin", "set.tar.gz"), checksum=_sum("md5", site.content))
    files = (File(name="a.dat", checksum=_sum("sha1", b"first"), also=("a.txt",)), File(name="b.dat"))
    made = Entry(name="set", about="for tests", folder="set", archives=(archive,), files=files)
    monkeypatch.setitem(CATALOGUE, "set", made)
    return made


def _run(tmp_path: Path, *words: str) -> int:
    return prepare.main([*words, "--root", str(tmp_path / "root")])


def _held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "prepared.json"}


def _one_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("data.prepare: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.usefixtures("entry")
def test_a_set_is_downloaded_verified_and_found_again(
    tmp_path: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, "set") == 0
    assert set(_held(tmp_path / "root" / "set")) == {"a.dat", "b.dat", "README"}
    recorded = json.loads((tmp_path / "root" / "set" / "prepared.json").read_text())
    assert recorded == {"a.dat": _sum("sha256", b"first"), "b.dat": _sum("sha256", b"second")}
    assert not (tmp_path / "root" / ".prepare" / "set").exists()
    said = capsys.readouterr().out
    assert "has the published checksum md5:" in said
    assert "has no published checksum of b.dat" in said
    assert _run(tmp_path, "set") == 0
    assert "is already in" in capsys.readouterr().out
    assert site.num_requests == 1


@pytest.mark.usefixtures("entry")
def test_a_set_that_changed_since_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path, "set") == 0
    (tmp_path / "root" / "set" / "b.dat").write_bytes(b"third")
    assert _run(tmp_path, "set") == 2
    assert "set/b.dat has changed since it was prepared: remove" in _one_line(capsys)


@pytest.mark.usefixtures("entry")
def test_a_wrong_checksum_prepares_nothing(tmp_path: Path, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    right, site.content = site.content, b"something else"
    assert _run(tmp_path, "set") == 2
    assert "the published one; run again, name another place with --url, or get set.tar.gz" in _one_line(capsys)
    assert not (tmp_path / "root" / "set").exists()
    site.content = right
    assert _run(tmp_path, "set") == 0


@pytest.mark.usefixtures("entry")
def test_a_crash_before_the_last_step_leaves_nothing_half(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as crash:
        crash.setattr(prepare, "record", _raise(SystemExit))  # unpacked, not renamed
        with pytest.raises(SystemExit):
            _run(tmp_path, "set")
    assert [path.name for path in (tmp_path / "root").iterdir()] == [".prepare"]
    assert _run(tmp_path, "set") == 0
    assert set(_held(tmp_path / "root" / "set")) == {"a.dat", "b.dat", "README"}
    assert site.num_requests == 1  # the archive was whole already


def _raise(error: BaseException | type[BaseException]) -> Callable[..., None]:
    def raising(*_: object, **__: object) -> None:
        raise error

    return raising


@pytest.mark.usefixtures("entry")
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "no space left under"),
        (PermissionError(errno.EACCES, "denied", "/x"), 2, "/x cannot be read or written (denied)"),
        (KeyboardInterrupt(), 130, "interrupted: run again to go on"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(prepare, "download", _raise(error))
    assert _run(tmp_path, "set") == code
    assert message in _one_line(capsys)


@pytest.mark.usefixtures("entry")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name one of cifar10, cifar100, wikitext2, wikitext103, ptb, "),
        (("cifr10",), "got 'cifr10'; did you mean 'cifar10'?"),
        (("set", "--from", "/nowhere"), "--from must name a folder, got '/nowhere'"),
        (("set", "--from", "/", "--url", "http://here/"), "exclude each other"),
        (("ptb", "--url", "http://here/one.txt"), "must end with / and name the folder that holds ptb.train.txt"),
        (("set", "--url", "here"), "or get set.tar.gz by other means and use --from DIR"),
        (("set", "--url", "http://127.0.0.1:1/"), "(Connection refused); run again, name another place"),
        (("imagenet",), "imagenet cannot be downloaded: give --from DIR"),
        (("imagenet", "--from", "/", "--size", "0"), "--size must be at least 1, got 0"),
        (("imagenet", "--from", "/"), "/train is not a folder: --from must name a folder that holds train/CLASS/*"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert _run(tmp_path, *words) == 2
    assert message in _one_line(capsys)


def test_another_address_is_asked_instead(tmp_path: Path, site: Site, entry: Entry) -> None:
    mirrored = replace(entry, archives=(replace(entry.archives[0], url="http://127.0.0.1:1/set.tar.gz"),))
    prepare.prepare(mirrored, tmp_path, url=site.url.removesuffix("file.bin"))
    assert (tmp_path / "set" / "a.dat").read_bytes() == b"first"


def test_two_processes_do_not_prepare_one_set(tmp_path: Path, entry: Entry) -> None:
    with prepare._work_folder(tmp_path, "set"), pytest.raises(ValueError, match=r"another process is preparing set in"):
        prepare.prepare(entry, tmp_path)


def test_the_list_names_every_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "root" / "ml-1m").mkdir(parents=True)
    assert _run(tmp_path, "--list") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in lines] == prepare.names()
    assert [words[0] for words in lines if words[1] == "there"] == ["movielens1m"]


@pytest.mark.usefixtures("entry")
def test_the_home_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare.main(["set", "--root", "~/root"]) == 0
    assert (tmp_path / "root" / "set" / "a.dat").is_file()


# From a folder


@pytest.mark.usefixtures("entry")
def test_an_archive_in_a_folder_is_verified_and_unpacked(
    tmp_path: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "set.tar.gz").write_bytes(b"other")
    assert _run(tmp_path, "set", "--from", str(tmp_path / "given")) == 2
    assert "given/set.tar.gz must have the published checksum md5:" in _one_line(capsys)
    (tmp_path / "given" / "set.tar.gz").write_bytes(site.content)
    assert _run(tmp_path, "set", "--from", str(tmp_path / "given")) == 0
    assert set(_held(tmp_path / "root" / "set")) == {"a.dat", "b.dat", "README"}
    assert site.num_requests == 0


@pytest.mark.usefixtures("entry")
@pytest.mark.parametrize("inner", ["set", "."])
def test_unpacked_files_are_taken_and_judged(tmp_path: Path, inner: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "given" / inner
    given.mkdir(parents=True)
    (given / "a.txt").write_bytes(b"another")
    assert _run(tmp_path, "set", "--from", str(tmp_path / "given")) == 0
    assert _held(tmp_path / "root" / "set") == {"a.dat": b"another"}
    said = capsys.readouterr().out
    assert "set lacks b.dat" in said
    assert "set is not the published copy: other checksums of a.dat" in said


@pytest.mark.usefixtures("entry")
def test_a_folder_without_the_set_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path, "set", "--from", str(tmp_path)) == 2
    assert "must hold set.tar.gz or set with a.dat, b.dat, and does not" in _one_line(capsys)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("wikitext2", {"wikitext-2/train.txt": "the end\n", "wikitext-2/valid.txt": "the\n"}),
        ("ptb", {"ptb.train.txt": "the end\n", "ptb.valid.txt": "the\n", "ptb.test.txt": "end\n"}),
        ("movielens100k", {"ml-100k/u.data": "1\t2\t5\t10\n1\t3\t4\t11\n2\t2\t4\t9\n2\t3\t1\t19\n"}),
    ],
)
def test_what_is_taken_lies_where_it_is_read(tmp_path: Path, name: str, files: dict[str, str]) -> None:
    for file, content in files.items():
        (tmp_path / "given" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "given" / file).write_text(content)
    assert _run(tmp_path, name, "--from", str(tmp_path / "given")) == 0
    folder = tmp_path / "root" / CATALOGUE[name].folder
    assert sorted(_held(folder).values()) == sorted(content.encode() for content in files.values())
    assert set(_held(folder)) <= {file.name for file in CATALOGUE[name].files}


@pytest.mark.parametrize("words", [["--nothing"], ["imagenet", "--size", "a"], ["a", "b"]])
def test_a_wrong_option_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_checksum_has_the_length_of_its_kind() -> None:
    archives = [archive.checksum for entry in CATALOGUE.values() for archive in entry.archives]
    files = [file.checksum for entry in CATALOGUE.values() for file in entry.files if file.checksum]
    assert (len(archives), len(files)) == (10, 17)
    for kind, value in (checksum.split(":") for checksum in archives + files):
        assert len(bytes.fromhex(value)) == hashlib.new(kind).digest_size


# ImageNet, from photographs that the test takes


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    shapes = {"train/n02/a.JPEG": (40, 20), "train/n02/b.JPEG": (20, 20), "train/n01/c.jpg": (16, 50)}
    shapes |= {"train/n01/d.png": (9, 12), "val/n02/e.JPEG": (30, 31)}
    for name, (width, height) in shapes.items():
        path = tmp_path / "photographs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        made = image.fromarray(pixels)
        (made.convert("L") if name.endswith("png") else made).save(path)
    (tmp_path / "photographs" / "train" / "n01" / "notes.txt").write_text("no photograph")
    return tmp_path / "photographs"


def _expected(path: Path, size: int) -> np.ndarray:
    """Shorter side resized, then the middle; done by hand."""
    from PIL import Image

    image = Image.open(path).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box)).transpose(2, 0, 1)


def test_photographs_are_converted_and_read_in_place(
    tmp_path: Path, photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("imagenet", "--from", str(photographs), "--size", "12", "--processes", "1")
    assert _run(tmp_path, *words) == 0
    assert "train/n01/notes.txt" in capsys.readouterr().out  # what is left out
    root = str(tmp_path / "root")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = data.load("imagenet", root=root, image_size=8)
    assert isinstance(loaded, data.Classification)
    names = ["n01/c.jpg", "n01/d.png", "n02/a.JPEG", "n02/b.JPEG"]
    for stored, name in zip(loaded.train_inputs, names, strict=True):
        assert np.array_equal(stored.numpy(), _expected(photographs / "train" / name, 12))
    assert loaded.train_targets.tolist() == [0, 0, 1, 1]
    assert loaded.test_targets.tolist() == [1]
    assert np.array_equal(loaded.test_inputs[0].numpy(), _expected(photographs / "val/n02/e.JPEG", 12)[:, 2:10, 2:10])
    info = data.info("imagenet", root, image_size=8)
    assert info.sizes == {"in_channels": 3, "num_classes": 2, "image_size": 8}
    assert (info.num_train, info.num_test) == (4, 1)
    assert sorted(path.name for path in (tmp_path / "root" / "imagenet").iterdir()) == [
        *("classes.json", "train_images.npy", "train_labels.npy", "val_images.npy", "val_labels.npy")
    ]
    assert _run(tmp_path, *words) == 0  # is there already
    _batches_of_mapped_images(loaded)


def _batches_of_mapped_images(loaded: data.Classification) -> None:
    settings: dict[str, Any] = {"batch_size": 2, "rank": 0, "world_size": 1, "mean": loaded.mean, "std": loaded.std}
    inputs, targets = loaded.train_inputs, loaded.train_targets
    train = data.ShardedBatches(inputs, targets, seed=0, augment="resized_crop", image_size=8, **settings)
    assert [shown.shape for shown, _ in train.epoch(0)] == [(2, 3, 8, 8)] * 2
    in_memory = data.ShardedBatches(inputs.clone(), targets, seed=0, augment="resized_crop", image_size=8, **settings)
    for (shown, _), (again, _) in zip(train.epoch(1), in_memory.epoch(1), strict=True):
        assert torch.equal(shown, again)
    shown, _ = next(iter(data.EvalBatches(loaded.test_inputs, loaded.test_targets, **settings)))
    assert shown.shape == (1, 3, 8, 8)


def test_a_conversion_that_was_killed_goes_on(
    tmp_path: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "CHUNK", 1)
    decode = convert.decode
    decoded: list[str] = []

    def counted(chunk: convert.Chunk) -> convert.Chunk:
        decoded.append(chunk.names[0])
        return decode(chunk)

    def killed_after_two(chunk: convert.Chunk) -> convert.Chunk:
        if len(decoded) == 2:
            raise SystemExit
        return counted(chunk)

    words = ("imagenet", "--from", str(photographs), "--size", "6", "--processes", "1")
    with monkeypatch.context() as killed:
        killed.setattr(convert, "decode", killed_after_two)
        with pytest.raises(SystemExit):
            _run(tmp_path, *words)
    root = tmp_path / "root"
    assert not (root / "imagenet").exists()
    done = root / ".prepare" / "imagenet" / "converted" / "done"
    done.write_text(done.read_text() + "train_im")  # a line that the crash tore
    monkeypatch.setattr(convert, "decode", counted)
    assert _run(tmp_path, *words) == 0
    assert decoded == ["n01/c.jpg", "n01/d.png", "n02/a.JPEG", "n02/b.JPEG", "n02/e.JPEG"]
    stored = np.load(root / "imagenet" / "train_images.npy")
    assert np.array_equal(stored[0], _expected(photographs / "train/n01/c.jpg", 6))
    assert np.array_equal(stored[3], _expected(photographs / "train/n02/b.JPEG", 6))


def test_a_conversion_of_other_photographs_begins_anew(tmp_path: Path, photographs: Path) -> None:
    folder = tmp_path / "converted"
    folder.mkdir()
    (folder / "plan").write_text("6 other\n")
    (folder / "done").write_text("train_images.npy 0\n")
    convert.convert(photographs, folder, size=6)
    assert np.load(folder / "train_images.npy")[0].any()


def _flat(root: Path, value: int, *, torn: bool) -> Path:
    """Write 300 images of one colour, whose files have the same names and sizes for every colour."""
    image = pytest.importorskip("PIL.Image")
    for split, num in (("train", 300), ("val", 1)):
        (root / split / "n01").mkdir(parents=True, exist_ok=True)
        for number in range(num):
            pixels = np.full((4, 4, 3), value, dtype=np.uint8)
            image.fromarray(pixels).save(root / split / "n01" / f"{number:03}.png", compress_level=0)
    if torn:
        (root / "train/n01/299.png").write_bytes(b"torn")
    return root


def test_a_conversion_that_broke_off_never_goes_on_with_other_photographs(tmp_path: Path) -> None:
    words = ("imagenet", "--size", "4", "--processes", "1", "--from")
    first, second = _flat(tmp_path / "first", 10, torn=True), _flat(tmp_path / "second", 200, torn=True)
    assert _run(tmp_path, *words, str(first)) == 2
    assert _run(tmp_path, *words, str(second)) == 2
    assert _run(tmp_path, *words, str(_flat(first, 10, torn=False))) == 0
    assert np.unique(np.load(tmp_path / "root/imagenet/train_images.npy")).tolist() == [10]
    assert _run(tmp_path / "again", *words, str(_flat(first, 10, torn=True))) == 2
    assert _run(tmp_path / "again", *words, str(_flat(second, 200, torn=False))) == 0
    assert np.unique(np.load(tmp_path / "again/root/imagenet/train_images.npy")).tolist() == [200]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_grey_of_8_and_of_16_bits_is_scaled_alike(tmp_path: Path, photographs: Path, dtype: type) -> None:
    from PIL import Image

    brightest = np.iinfo(dtype).max
    grey = (np.arange(100).reshape(10, 10) / 99 * brightest).astype(dtype)
    Image.fromarray(grey).save(photographs / "train/n01/d.png")
    assert _run(tmp_path, "imagenet", "--from", str(photographs), "--size", "10", "--processes", "1") == 0
    stored = np.load(tmp_path / "root/imagenet/train_images.npy")[1]
    assert np.abs(stored / 255 - grey / brightest).max() < 1 / 255


def test_every_class_has_a_label_of_its_own_or_is_refused(
    tmp_path: Path, photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("imagenet", "--from", str(photographs), "--size", "12", "--processes", "1")
    added = photographs / "train" / "n011"
    added.mkdir()
    (photographs / "train" / ".cache").mkdir()
    for name in (".DS_Store", "a.avif"):
        (added / name).write_bytes(b"not read")
        assert _run(tmp_path, *words) == 2
        assert f"{added} " in _one_line(capsys)
    shutil.copy(photographs / "train/n02/a.JPEG", added / "b.webp")  # decoded by its content
    assert _run(tmp_path, *words) == 0
    assert np.load(tmp_path / "root/imagenet/train_labels.npy").tolist() == [0, 0, 1, 2, 2]
    assert json.loads((tmp_path / "root/imagenet/classes.json").read_text()) == ["n01", "n011", "n02"]
    assert "train/n011/a.avif" in capsys.readouterr().out


def test_several_processes_convert_to_the_same_bytes(
    tmp_path: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "START_METHOD", "fork")  # spawned ones would import torch first, for seconds
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        convert.convert(photographs, tmp_path / str(processes), size=6, processes=processes)
    assert _held(tmp_path / "1") == _held(tmp_path / "2")


def test_a_photograph_that_cannot_be_decoded_is_named(
    tmp_path: Path, photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = photographs / "train" / "n02" / "b.JPEG"
    bad.write_bytes(bad.read_bytes()[:300])
    assert _run(tmp_path, "imagenet", "--from", str(photographs), "--processes", "1") == 2
    assert f"{bad} cannot be decoded" in _one_line(capsys)


def test_a_layout_that_cannot_be_converted_is_told(
    tmp_path: Path, photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photographs / "val" / "n02").rename(photographs / "val" / "n03")
    assert _run(tmp_path, "imagenet", "--from", str(photographs)) == 2
    assert "val must hold classes of train, got 'n03'" in _one_line(capsys)
    shutil.rmtree(photographs / "val" / "n03")
    assert _run(tmp_path, "imagenet", "--from", str(photographs)) == 2
    assert "val must hold one folder per class" in _one_line(capsys)


def test_images_are_hashed_once_and_their_time_is_compared(
    tmp_path: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(file_sums, "LARGE", 400)
    words = ("imagenet", "--from", str(photographs), "--size", "12", "--processes", "1")
    assert _run(tmp_path, *words) == 0
    root, images = str(tmp_path / "root"), tmp_path / "root" / "imagenet" / "train_images.npy"
    before = data.sums("imagenet", root, image_size=8)
    assert {"train_images.npy", "val_images.npy", "train_labels.npy"} < set(before)
    stored = np.load(images)
    np.save(images, 255 - stored)
    with pytest.raises(
        ValueError, match=r"train_images\.npy is not as it was prepared.* python -m data\.prepare imagenet"
    ):
        data.check("imagenet", root, image_size=8)
    assert _run(tmp_path, *words) == 0
    after = data.sums("imagenet", root, image_size=8)
    assert [name for name in before if after[name] != before[name]] == ["train_images.npy"]


def test_converted_files_that_do_not_fit_are_told(tmp_path: Path, photographs: Path) -> None:
    assert _run(tmp_path, "imagenet", "--from", str(photographs), "--size", "12", "--processes", "1") == 0
    root, folder = str(tmp_path / "root"), tmp_path / "root" / "imagenet"
    with pytest.raises(ValueError, match=r"image_size of imagenet must be at most the 12 pixels that .* got 13"):
        data.check("imagenet", root, image_size=13)
    np.save(folder / "val_labels.npy", np.array([2]))
    with pytest.raises(ValueError, match=r"val_labels\.npy does not fit .*: run python -m data\.prepare imagenet"):
        data.check("imagenet", root, image_size=8)
    (folder / "train_images.npy").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"train_images\.npy is torn or no \.npy file"):
        data.check("imagenet", root, image_size=8)
