"""Download a file so that a broken connection, or a run that was stopped, goes on where it was."""

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from data.progress import Report, silent

CHUNK = 1 << 20
TIMEOUT_S = 30.0
ATTEMPTS = 5  # in a row, without a byte more than before
RETRIED = (408, 425, 429, 500, 502, 503, 504)  # answers of HTTP that may be better the next time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """Which file a part belongs to: written beside it, so that parts of two files are never joined."""

    url: str
    tag: str | None  # ETag, or else Last-Modified
    length: int | None


class _Broken(Exception):
    """What may be better the next time."""


class _Stale(Exception):
    """The part on disk is of no use."""


def fetch(url: str, path: Path, *, report: Report = silent, pause_s: float = 1.0) -> None:
    """Download url to path; what has come so far stands in ``path.part`` and is not downloaded again.

    The part is thrown away when the server cannot resume, or when tag or length of the file there have changed.

    Args:
        url: of http or https.
        path: the file to make; it appears when it is whole.
        report: told the bytes that have come and the bytes of the whole.
        pause_s: seconds before the second attempt, doubled for every further one.
    Raises:
        ValueError: the address cannot be reached or does not give the file.
        OSError: the file cannot be written.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(f"url must begin with http:// or https://, got '{url}'")
    part = path.with_name(path.name + ".part")
    most, failures, restarts = _size(part), 0, 0
    while True:
        try:
            _receive(url, part, report)
            break
        except _Stale as error:
            _drop(part)
            most, restarts = 0, restarts + 1
            if restarts == ATTEMPTS:
                raise ValueError(f"{url} cannot be had (it changes while it is downloaded)") from error
        except _Broken as error:
            failures = 1 if _size(part) > most else failures + 1
            most = max(most, _size(part))
            if failures == ATTEMPTS or _is_hopeless(error, most):
                kept = f"; the {_size(part)} bytes that came are kept, run again to go on" if _size(part) else ""
                raise ValueError(f"{url} cannot be reached ({error}){kept}") from error
            time.sleep(pause_s * 2 ** (failures - 1))
    os.replace(part, path)
    _drop(part)


def _receive(url: str, part: Path, report: Report) -> None:
    """Append to part what is missing of the file."""
    known = _known(url, part)
    with _ask(url, known, _size(part)) as answer:
        if answer.status == 206:
            start, version = _size(part), _resumed(url, answer, known, _size(part))
        else:
            start, version = 0, _offered(url, answer)
            _drop(part)
            _note(part).write_text(json.dumps(asdict(version)))
        _append(answer, part, start, version.length, report)


def _ask(url: str, known: _Version | None, have: int) -> HTTPResponse:
    headers = {"User-Agent": "micro-sparse (data.prepare)", "Accept-Encoding": "identity"}
    if known is not None:
        headers["Range"] = f"bytes={have}-"
        # Without a strong tag the server cannot be asked to compare; the answer's own tag and length are compared.
        if known.tag and not known.tag.startswith("W/"):
            headers["If-Range"] = known.tag
    try:
        answer: HTTPResponse = urlopen(Request(url, headers=headers), timeout=TIMEOUT_S)
    except HTTPError as error:
        error.close()
        if error.code == 416 and known is not None:
            raise _Stale from error
        if error.code in RETRIED:
            raise _Broken(f"it answers {error.code} {error.reason}") from error
        raise ValueError(f"{url} cannot be had (it answers {error.code} {error.reason})") from error
    except (OSError, HTTPException) as error:
        raise _Broken(_reason(error)) from error
    return answer


def _append(answer: HTTPResponse, part: Path, start: int, length: int | None, report: Report) -> None:
    done = start
    with part.open("ab") as file:
        report(done, length)
        for chunk in _chunks(answer):
            file.write(chunk)
            done += len(chunk)
            report(done, length)
    if length is not None and done > length:
        raise _Stale
    if length is not None and done < length:
        raise _Broken(f"the connection broke off after {done} of {length} bytes")


def _chunks(answer: HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            chunk = answer.read1(CHUNK)  # not read, which throws away what came before the break
        except (OSError, HTTPException) as error:
            raise _Broken(_reason(error)) from error
        if not chunk:
            return
        yield chunk


def _resumed(url: str, answer: HTTPResponse, known: _Version | None, have: int) -> _Version:
    """Return the version that an answer goes on with; raise _Stale where it is another one."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""))
    if known is None or found is None or int(found[1]) != have:
        raise _Stale
    if _Version(url=url, tag=_tag(answer), length=int(found[3])) != known:
        raise _Stale
    return known


def _offered(url: str, answer: HTTPResponse) -> _Version:
    length = answer.headers.get("Content-Length", "")
    return _Version(url=url, tag=_tag(answer), length=int(length) if length.isdigit() else None)


def _tag(answer: HTTPResponse) -> str | None:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified")


def _known(url: str, part: Path) -> _Version | None:
    """Return the version of a part that can be gone on with, or None."""
    try:
        known = _Version(**json.loads(_note(part).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    usable = known.url == url and known.length is not None and 0 < _size(part) < known.length
    return known if usable else None


def _note(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _drop(part: Path) -> None:
    part.unlink(missing_ok=True)
    _note(part).unlink(missing_ok=True)


def _is_hopeless(error: _Broken, received: int) -> bool:
    """Tell whether there is no network or no such host, rather than a connection that broke."""
    cause: object = error.__cause__
    reason = cause.reason if isinstance(cause, URLError) else cause
    return received == 0 and isinstance(reason, socket.gaierror | ConnectionRefusedError)


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
