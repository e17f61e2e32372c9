"""One file of `cifar-10-batches-py`, a Python pickle, read without running anything that it names.

A pickle may call any function. The original files name three things of numpy; here these stand for
records that only keep what they are given, and any other name is refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

_PIXELS = 3 * 32 * 32


class _Dtype:
    """Stands for numpy.dtype: keeps its code, such as "u1"."""

    def __init__(self, code: Any, *_: Any):
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Byte order and fields: of no meaning for bytes."""


class _Array:
    """Stands for numpy.ndarray: keeps (version, shape, dtype, Fortran order, bytes)."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def read(self) -> np.ndarray:
        _, shape, dtype, fortran, content = self.state
        if isinstance(content, str):  # Python 2's bytes, if it was read as text
            content = content.encode("latin1")
        if not isinstance(dtype, _Dtype) or dtype.code != "u1" or fortran or not isinstance(content, bytes):
            raise TypeError
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in the old protocols."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the encoding {encoding!r}")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _ALLOWED[module, name]


def read_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 3072) as uint8 and labels (count,). What is not such a file is refused by name."""
    try:
        with path.open("rb") as file:
            found = _Reader(file, encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"refused to read {str(path)!r}: not CIFAR-10, or corrupt; it asks for {error}") from None
    except (EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, UnicodeError, MemoryError):
        raise ValueError(f"{str(path)!r} is truncated or corrupt: not a whole pickle") from None
    try:
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in found.items()}
        images, labels = fields["data"].read(), np.array(fields["labels"], dtype=np.int64)
        if images.ndim != 2 or images.shape[1] != _PIXELS or labels.shape != (len(images),) or (labels < 0).any():
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(
            f"expected {str(path)!r} to have data (count, {_PIXELS}) and as many labels, as a file of "
            "cifar-10-batches-py has; it is corrupt, or something else"
        ) from None
    return images, labels
