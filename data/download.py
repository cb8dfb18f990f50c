"""Download a file and verify its checksum."""

import logging
import sys
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 30.0  # limit for connecting, and between two pieces of the answer
CHUNK = 1 << 20


def download(url: str, path: Path, checksum: str) -> None:
    """Download ``url`` to ``path``; the file appears there when it is complete and verified.

    A file that is there already with this checksum is not downloaded again. On a terminal a bar shows the progress.

    Args:
        url: of http or https.
        checksum: ``KIND:SUM``, of a kind that hashlib knows.
    Raises:
        ValueError: the address cannot be reached, refuses, breaks off, or gives another file.
        OSError: the file cannot be written.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(f"url must begin with http:// or https://, got '{url}'")
    import pooch  # imported here: loading a data set needs neither package
    from requests import HTTPError, RequestException

    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(),
        chunk_size=CHUNK,
        timeout=TIMEOUT_S,
        headers={"User-Agent": "micro-sparse (data.prepare)", "Accept-Encoding": "identity"},
    )
    try:
        pooch.retrieve(url, checksum, fname=path.name, path=path.parent, downloader=downloader)
    except HTTPError as error:
        answer = (
            f" (it answers {error.response.status_code} {error.response.reason})" if error.response is not None else ""
        )
        raise ValueError(f"{url} cannot be downloaded{answer}") from error
    except RequestException as error:
        raise ValueError(f"{url} cannot be downloaded ({_reason(error)})") from error
    except ValueError as error:  # pooch's error for a wrong checksum
        raise ValueError(f"{url} gives a file whose checksum is not {checksum}, the published one") from error


def _reason(error: BaseException) -> str:
    """Return the innermost message of a network error."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
