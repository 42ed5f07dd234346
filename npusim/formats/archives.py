"""Reads ``.npz`` files of other programs; refuses pickles, and arrays larger than the file can contain."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from npusim.errors import TensorError
from npusim.sanitize import regular_file
from npusim.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Largest size in bytes of a file, and of all its arrays together: Q, K and V of 32 heads of 128 for half a million
#: tokens.
MOST_BYTES = 16 << 30
#: Deflate expands one byte to at most 1,032 (zlib's technical notes): a member with a larger ratio is invalid.
_MOST_RATIO = 1032


def read_archive(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an ``.npz`` by name, after `check_archive`.

    Raises `TensorError` like `check_archive`; errors of numpy for damaged data pass through to the caller.
    """
    check_archive(path)
    with np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def check_archive(path: Path) -> None:
    """Raise `TensorError` if it is not a file, if an array's header claims more bytes than its member has, or if the
    file or all arrays together have more than `MOST_BYTES`; the check allocates nothing.
    """
    total = 0
    with zipfile.ZipFile(regular_file(path, MOST_BYTES, TensorError)) as archive:
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                continue
            with archive.open(member) as stream:
                claimed = _claimed_bytes(stream)
            there = min(
                member.file_size, member.compress_size * _MOST_RATIO if member.compress_type else member.compress_size
            )
            name = member.filename.removesuffix(".npy")
            if claimed > there:
                raise TensorError(
                    f"{path}: {name} should have {format_bytes(claimed)}, but the file has at most "
                    f"{format_bytes(there)} of it: it is truncated, or its header is wrong"
                )
            total += claimed
            if total > MOST_BYTES:
                raise TensorError(
                    f"{path}: its arrays up to {name} have {format_bytes(total)}; allowed: {format_bytes(MOST_BYTES)}"
                )


def _claimed_bytes(stream: IO[bytes]) -> int:
    """Return the number of bytes of data that an array's header states; raise `ValueError` if it is not a header."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    return math.prod(max(0, int(size)) for size in shape) * int(dtype.itemsize)  # Python's integers do not overflow
