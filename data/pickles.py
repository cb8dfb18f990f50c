"""Unpickle arrays from an untrusted file, without running its code."""

import io
import pickle
from typing import Any

import numpy as np

# The functions by which numpy rebuilds arrays. numpy itself names them, because their modules moved between 1 and 2.
_REBUILD: tuple[Any, ...] = (
    np.empty(0).__reduce__()[0],
    np.empty(0).__reduce_ex__(5)[0],
    np.int64(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
)
_NUMPY = {rebuild.__name__: rebuild for rebuild in _REBUILD}


class _ArraysOnly(pickle.Unpickler):
    """Admit numpy arrays and scalars; lists, dicts, strings and numbers need no import and always pass."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in _NUMPY:
            return _NUMPY[name]
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")


def loads(content: bytes) -> Any:
    """Return the object pickled in content: arrays, numbers, strings, and lists, tuples and dicts of them.

    Python 2's byte strings come back as str, one character per byte.

    Raises:
        ValueError: content is torn, or asks for anything beyond such objects.
    """
    try:
        return _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{error or type(error).__name__}".splitlines()[0]) from error


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Replace the function that pickles of protocol 2 call for bytes of Python 3."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}, which no array needs")
    return text.encode("latin1")
