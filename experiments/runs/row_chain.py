"""The sum that ends every row of a record: a CRC-32 of the row, chained on the sum of the row before.

A row that was changed, moved, repeated or added has another sum than it says, and so has the row behind those that are
missing. The sum costs less than a tenth of what it takes to write the row.
"""

import re
import zlib

KEY = "sum"
NO_ROWS = 0  # the sum before the first row
ROWS_ARE_MISSING = 1  # the sum from which the next row is chained where earlier rows are lost: it fits no row before it
_END = re.compile(rb'(?:, )?"sum": "([0-9a-f]{8})"\}\n?\Z')


def chained(row: bytes, before: int) -> tuple[bytes, int]:
    """Return the line of a row, and its sum.

    Args:
        row: a JSON object.
        before: the sum of the row before it.
    """
    body = row[:-1]
    own = zlib.crc32(body, before)
    comma = b"" if body == b"{" else b", "
    return b'%b%b"sum": "%08x"}\n' % (body, comma, own), own


def own_sum(line: bytes) -> int | None:
    """Return the sum that a line says it has; None where it has none, as in records of earlier versions."""
    found = _END.search(line, max(0, len(line) - 24))
    return int(found[1], 16) if found else None


def expected_sum(line: bytes, before: int) -> int:
    """Return the sum that a line with a sum should have."""
    found = _END.search(line, max(0, len(line) - 24))
    assert found
    return zlib.crc32(line[: found.start()], before)


def without_sum(row: dict[str, object]) -> dict[str, object]:
    """Return a row without its sum; the row is changed."""
    row.pop(KEY, None)
    return row
