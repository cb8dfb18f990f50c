"""Data sets are downloaded, verified and unpacked whole, or not at all."""

import errno
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data import prepare, unpack
from data.catalogue import CATALOGUE, Archive, Entry, File
from tests.data_sets import written
from tests.refusals import refused

CONTENT = bytes(range(256)) * 1200
MEMBERS = {"set/a.dat": b"first", "set/b.dat": b"second", "set/README": b"read me"}
WHOLE = {name.removeprefix("set/"): content for name, content in MEMBERS.items()}
needs_entry = pytest.mark.usefixtures("entry")


def checksum(kind: str, content: bytes) -> str:
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


def tar(members: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()


class Site(ThreadingHTTPServer):
    """Offer one content under every name, or 404 where there is none."""

    content: bytes | None = CONTENT
    num_requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/set.tar.gz"


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.num_requests += 1
        self.send_response(404 if self.server.content is None else 200)
        self.end_headers()
        self.wfile.write(self.server.content or b"")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(("127.0.0.1", 0), Handler) as site:
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        site.shutdown()
        thread.join()


@pytest.fixture
def entry(site: Site, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """Enter a set into the catalogue whose archive the server offers."""
    site.content = tar(MEMBERS)
    archive = Archive(url=site.url, checksum=checksum("md5", site.content))
    files = (File(name="a.dat", checksum=checksum("sha1", b"first"), also=("a.txt",)), File(name="b.dat"))
    made = Entry(name="set", about="for tests", folder="set", archives=(archive,), files=files)
    monkeypatch.setitem(CATALOGUE, "set", made)
    return made


@dataclass
class Command:
    """The command with a root of its own."""

    root: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> str:
        """Return what a run that succeeds says."""
        assert prepare.main([*words, "--root", str(self.root)]) == 0
        return self.capsys.readouterr().out

    def fails(self, *words: str, code: int = 2) -> str:
        """Return the one line of a run that fails."""
        assert prepare.main([*words, "--root", str(self.root)]) == code
        (line,) = (line for line in self.capsys.readouterr().err.splitlines() if line.startswith("data.prepare: "))
        return line

    def held(self, folder: str = "set") -> dict[str, bytes]:
        paths = (self.root / folder).iterdir()
        return {path.name: path.read_bytes() for path in paths if path.name != "prepared.json"}


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "root", capsys)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tar.gz", tar({"set/x": CONTENT})[:-40]),
        ("a.zip", zipped({"set/x": CONTENT})[:-40]),
        ("a.tar.gz", tar({"../outside": b"x"})),
    ],
    ids=["torn tar", "torn zip", "unsafe"],
)
def test_an_archive_that_is_torn_or_unsafe_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "target").mkdir()
    refused(lambda: unpack.unpack(written(tmp_path, {name: content}) / name, tmp_path / "target"), f"{name} is torn")
    assert not (tmp_path / "outside").exists()


@needs_entry
def test_a_set_is_downloaded_verified_and_found_again_unchanged(command: Command, site: Site) -> None:
    said = command("set")
    assert "has the published checksum md5:" in said
    assert "has no published checksum of b.dat" in said
    assert command.held() == WHOLE
    recorded = json.loads((command.root / "set" / "prepared.json").read_text())
    assert recorded == {name: checksum("sha256", WHOLE[name]) for name in ("a.dat", "b.dat")}
    assert not (command.root / ".prepare" / "set").exists()
    assert "is already in" in command("set")
    assert site.num_requests == 1
    (command.root / "set" / "b.dat").write_bytes(b"third")
    assert "set/b.dat has changed since it was prepared: remove" in command.fails("set")


@needs_entry
@pytest.mark.parametrize(("content", "words"), [(b"something else", "whose checksum is not md5:"), (None, "404")])
def test_a_download_that_fails_prepares_nothing(
    command: Command, site: Site, content: bytes | None, words: str
) -> None:
    right, site.content = site.content, content
    line = command.fails("set")
    assert words in line
    assert "name another place with --url" in line
    assert not (command.root / "set").exists()
    site.content = right
    command("set")


@needs_entry
def test_a_crash_before_the_last_step_leaves_nothing_half(
    command: Command, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as crash:
        crash.setattr(prepare, "record", raising(SystemExit()))  # unpacked, not renamed
        with pytest.raises(SystemExit):
            command("set")
    assert [path.name for path in command.root.iterdir()] == [".prepare"]
    command("set")
    assert command.held() == WHOLE
    assert site.num_requests == 1  # the archive was whole already


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@needs_entry
@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "no space left under"),
        (PermissionError(errno.EACCES, "denied", "/x"), 2, "/x cannot be read or written (denied)"),
        (KeyboardInterrupt(), 130, "interrupted: run again to go on"),
    ],
)
def test_what_goes_wrong_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    monkeypatch.setattr(prepare, "download", raising(error))
    assert words in command.fails("set", code=code)


MISTAKES = {
    "": "name one of cifar10",
    "cifr10": "'cifr10'; did you mean 'cifar10'",
    "set --from /nowhere": "--from must name a folder, got '/nowhere'",
    "set --from / --url http://here/": "--from and --url",
    "set --from .": "set.tar.gz or set with a.dat, b.dat",
    "ptb --url http://here/one.txt": "ptb.train.txt",
    "set --url ftp://here/x": "'ftp://here/x'",
    "set --url http://127.0.0.1:1/": "Connection refused",
    "imagenet": "give --from DIR",
    "imagenet --from / --size 0": "--size must be at least 1, got 0",
    "imagenet --from /": "/train is not a folder",
    "--nothing": "--nothing",
}


@needs_entry
@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_one_line(command: Command, given: str) -> None:
    assert MISTAKES[given] in command.fails(*given.split())


def test_another_address_is_asked_instead(command: Command, site: Site, entry: Entry) -> None:
    mirrored = replace(entry, archives=(replace(entry.archives[0], url="http://127.0.0.1:1/set.tar.gz"),))
    prepare.prepare(mirrored, command.root, url=site.url.removesuffix("set.tar.gz"))
    assert command.held() == WHOLE


def test_two_processes_do_not_prepare_one_set(tmp_path: Path, entry: Entry) -> None:
    with prepare._work_folder(tmp_path, "set"):
        refused(lambda: prepare.prepare(entry, tmp_path), "another process is preparing set in")


def test_the_list_names_every_set_below_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "root" / "ml-1m").mkdir(parents=True)
    assert prepare.main(["--list", "--root", "~/root"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in lines] == prepare.names()
    assert [words[0] for words in lines if words[1] == "there"] == ["movielens1m"]


# From a folder


@needs_entry
def test_an_archive_in_a_folder_is_verified_and_unpacked(command: Command, site: Site, tmp_path: Path) -> None:
    written(tmp_path, {"set.tar.gz": b"other"})
    assert "set.tar.gz must have the published checksum md5:" in command.fails("set", "--from", str(tmp_path))
    written(tmp_path, {"set.tar.gz": site.content or b""})
    command("set", "--from", str(tmp_path))
    assert command.held() == WHOLE
    assert site.num_requests == 0


@needs_entry
@pytest.mark.parametrize("inner", ["set", "."])
def test_unpacked_files_are_taken_and_compared_with_the_published_ones(
    command: Command, tmp_path: Path, inner: str
) -> None:
    said = command("set", "--from", str(written(tmp_path / "given", {f"{inner}/a.txt": b"another"})))
    assert command.held() == {"a.dat": b"another"}
    assert "set lacks b.dat" in said
    assert "set is not the published copy: other checksums of a.dat" in said


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("wikitext2", {"wikitext-2/train.txt": b"the end\n", "wikitext-2/valid.txt": b"the\n"}),
        ("ptb", {"ptb.train.txt": b"the end\n", "ptb.valid.txt": b"the\n", "ptb.test.txt": b"end\n"}),
        ("movielens100k", {"ml-100k/u.data": b"1\t2\t5\t10\n1\t3\t4\t11\n2\t2\t4\t9\n2\t3\t1\t19\n"}),
    ],
)
def test_what_is_taken_lies_where_it_is_read(
    command: Command, tmp_path: Path, name: str, files: dict[str, bytes]
) -> None:
    command(name, "--from", str(written(tmp_path / "given", files)))
    held = command.held(CATALOGUE[name].folder)
    assert sorted(held.values()) == sorted(files.values())
    assert set(held) <= {file.name for file in CATALOGUE[name].files}
