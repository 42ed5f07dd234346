"""Outputs of matrix units that were recorded on a chip: load an ``.npz`` and compare every output bit.

Form of the file: keys ``<registry name>@<chip>/<A|B|C|D>`` and optionally ``/kind``, all bit patterns, A (case, M, K),
B (case, K, N), C and D (case, M, N).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from npusim.errors import TensorError
from npusim.formats.matmul import matmul
from npusim.formats.mma_arithmetic import get_arithmetic
from npusim.simulation.tensor_files import read_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.formats.cast import Array
    from npusim.formats.float_format import FloatFormat
    from npusim.formats.mma_arithmetic import MmaArithmetic

_ROLES = ("A", "B", "C", "D")
#: Number of cases, with one output each, that are computed as one product.
TOGETHER = 16


@dataclass(frozen=True)
class MmaVectors:
    """The cases of one instruction on one chip, as arrays in its formats.

    ``a`` (case, M, K), ``b`` (case, K, N), ``c`` and ``d`` (case, M, N); ``kind`` (case,) or None.
    """

    name: str
    arithmetic: MmaArithmetic
    a: Array
    b: Array
    c: Array
    d: Array
    kind: Array | None


@dataclass(frozen=True)
class VectorReport:
    """The number of equal outputs of one instruction, and the first output that differs (or None)."""

    matched: int
    total: int
    first_mismatch: str | None


def load_vectors(path: str | Path) -> Mapping[str, MmaVectors]:
    """Return the vectors of a file by name ``<registry name>@<chip>``, sorted.

    Raises `TensorError` if the file is missing, damaged, truncated, no ``.npz`` or contains a pickle, or if keys,
    dtypes or shapes differ from the form; the message names file and key; `FormatError` if a name is not in
    ``ARITHMETICS``.
    """
    arrays = read_tensors(Path(path))
    names = sorted({key.rpartition("/")[0] for key in arrays})
    if not names or "" in names:
        raise TensorError(f"{path}: keys must be <name>@<chip>/<A|B|C|D|kind>; got {_some(arrays)}")
    return MappingProxyType({name: _vectors(Path(path), name, arrays) for name in names})


def _some(arrays: Mapping[str, Array]) -> str:
    keys = sorted(arrays)
    return ", ".join(repr(key) for key in keys[:3]) + (", ..." if len(keys) > 3 else "")


def _vectors(path: Path, name: str, arrays: Mapping[str, Array]) -> MmaVectors:
    """Check the arrays of one name and give them their dtypes."""
    unit = get_arithmetic(name.partition("@")[0])
    formats: dict[str, FloatFormat] = {"A": unit.a, "B": unit.b, "C": unit.acc, "D": unit.acc}
    typed = {}
    for role, fmt in formats.items():
        key = f"{name}/{role}"
        if key not in arrays:
            raise TensorError(f"{path}: {key} is missing")
        bits = arrays[key]
        if bits.dtype != fmt.bits_dtype or bits.ndim != 3:
            raise TensorError(
                f"{path}: {key} is {bits.dtype} with {bits.ndim} axes; "
                f"needs {fmt.bits_dtype} with 3 (case, rows, columns)"
            )
        typed[role] = np.ascontiguousarray(bits).view(fmt.dtype)
    a, b, c, d = (typed[role] for role in _ROLES)
    cases, rows, depth = a.shape
    wanted = {"B": (cases, depth, b.shape[2]), "C": (cases, rows, b.shape[2])}
    wanted["D"] = wanted["C"]
    for role, shape in wanted.items():
        if typed[role].shape != shape:
            raise TensorError(f"{path}: {name}/{role} has shape {typed[role].shape}; A and B need {shape}")
    if depth == 0 or depth % unit.k:
        raise TensorError(f"{path}: {name}/A has K = {depth}; {unit.name} adds {unit.k} at a time")
    kind = arrays.get(f"{name}/kind")
    if kind is not None and kind.shape != (cases,):
        raise TensorError(f"{path}: {name}/kind has shape {kind.shape}; needs ({cases},)")
    return MmaVectors(name, unit, a, b, c, d, kind)


def check_vectors(path: str | Path, only: str = "*") -> dict[str, VectorReport]:
    """Return, for each name that ``only`` (a glob) selects, the number of outputs of :func:`matmul` with equal bits.

    NaN and signed zero are compared as bits too.

    Raises `TensorError` or `FormatError` as :func:`load_vectors`.
    """
    return {name: compare(vectors) for name, vectors in load_vectors(path).items() if fnmatchcase(name, only)}


def compare(vectors: MmaVectors) -> VectorReport:
    """Return the number of outputs of one instruction that its arithmetic explains."""
    result = _products(vectors)
    bits = vectors.arithmetic.acc.bits_dtype
    got, wanted = result.view(bits), vectors.d.view(bits)
    differs = got != wanted
    count = int(np.count_nonzero(differs))
    first = None if count == 0 else _describe(vectors, result, np.argwhere(differs)[0])
    return VectorReport(matched=differs.size - count, total=differs.size, first_mismatch=first)


def _products(vectors: MmaVectors) -> Array:
    """Return the unit's result for every case, as ``d``.

    Cases of one output each are on the diagonals of larger products, whose outputs do not depend on one another.
    """
    a, b, c, unit = vectors.a, vectors.b, vectors.c, vectors.arithmetic
    if c.shape[1:] != (1, 1):
        return matmul(a, b, c, arithmetic=unit)
    result, diagonal = np.empty_like(c), np.arange(TOGETHER)
    for at in range(0, len(c), TOGETHER):
        part, which = slice(at, at + TOGETHER), diagonal[: len(c) - at]
        square = np.zeros((len(which), len(which)), c.dtype)
        square[which, which] = c[part, 0, 0]
        wide = matmul(a[part, 0], np.ascontiguousarray(b[part, :, 0].T), square, arithmetic=unit)
        result[part, 0, 0] = wide[which, which]
    return result


def _describe(vectors: MmaVectors, result: Array, index: Array) -> str:
    """Return where the first difference is, as bits and as values."""
    case, row, column = (int(item) for item in index)
    width = 2 * vectors.arithmetic.acc.size_bytes
    bits = vectors.arithmetic.acc.bits_dtype

    def shown(array: Array) -> str:
        pattern = int(array.view(bits)[case, row, column])
        return f"0x{pattern:0{width}x} = {float(array[case, row, column])!r}"

    kind = "" if vectors.kind is None else f" (kind {int(vectors.kind[case])})"
    return (
        f"case {case}{kind}, row {row}, column {column}: got {shown(result)}, "
        f"expected {shown(vectors.d)}, c {shown(vectors.c)}"
    )
