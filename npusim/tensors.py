"""Reads Q, K and V from files a user has: safetensors or npz, by path or by packaged name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import TensorError
from npusim.formats.float_format import format_of_dtype
from npusim.spec.packaged import list_tensors, packaged_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tensors = dict[str, "NDArray[Any]"]
NAMES = ("q", "k", "v")
DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float32", "float64")


def load_tensors(source: str | Path | Mapping[str, NDArray[Any]], *, prefix: str = "") -> Tensors:
    """Return ``{"q", "k", "v"}`` as (batch, heads, rows, head size), float16 or bfloat16.

    ``source`` is a path, the name of packaged data, or a mapping.  Keys are ``q k v`` or
    ``<prefix>.q ...``; without ``prefix`` a file with one set of keys needs none.

    Raises
    ------
    TensorError
        The file is missing, truncated or has other keys; shapes do not fit together; a dtype is
        not float16 or bfloat16; or a value is NaN (position named).
    """
    where = "tensors" if isinstance(source, Mapping) else str(source)
    raw = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    found = _pick(raw, prefix, where)
    for name, values in found.items():
        _check(name, values, where)
    _check_together(found, where)
    return found


def _read(path: Path) -> Tensors:
    if not path.exists():
        packaged = packaged_tensors(str(path))
        if packaged is None:
            known = ", ".join(list_tensors())
            raise TensorError(
                f"{path}: no such file, and no packaged tensors of that name; packaged: {known}"
            )
        path = packaged
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {key: archive[key] for key in archive.files}
        from safetensors.numpy import load_file

        return dict(load_file(path))
    except Exception as error:  # noqa: BLE001 - the readers' own errors differ by version
        raise TensorError(f"{path}: not a readable tensor file, or truncated: {error}") from None


def _pick(raw: Mapping[str, NDArray[Any]], prefix: str, where: str) -> Tensors:
    if prefix:
        keys = {n: f"{prefix}.{n}" for n in NAMES}
    elif all(n in raw for n in NAMES):
        keys = {n: n for n in NAMES}
    else:
        prefixes = [k[: -len(".q")] for k in raw if k.endswith(".q")]
        if len(prefixes) != 1:
            listed = ", ".join(sorted(raw)) or "none"
            raise TensorError(
                f"{where}: keys q, k, v or one <prefix>.q, .k, .v needed; it has {listed}"
            )
        keys = {n: f"{prefixes[0]}.{n}" for n in NAMES}
    missing = [k for k in keys.values() if k not in raw]
    if missing:
        raise TensorError(f"{where}: no key {missing[0]!r}; it has {', '.join(sorted(raw))}")
    return {n: raw[k] for n, k in keys.items()}


def _check(name: str, values: NDArray[Any], where: str) -> None:
    if values.ndim != 4:
        raise TensorError(
            f"{where}: {name} has shape {values.shape}; 4 axes (batch, heads, tokens, head size) needed"
        )
    fmt = format_of_dtype(values.dtype)
    if fmt is None or fmt.name not in DTYPES:
        raise TensorError(f"{where}: {name} is {values.dtype}; {' or '.join(DTYPES)} needed")
    for what, bad in (("NaN", np.isnan(values)), ("Inf", np.isinf(values))):
        if bad.any():
            first = tuple(int(i[0]) for i in np.nonzero(bad))
            raise TensorError(f"{where}: {name} has {int(bad.sum())} {what}, the first at {first}")


def _check_together(found: Tensors, where: str) -> None:
    q, k, v = (found[n].shape for n in NAMES)
    faults = []
    if not q[0] == k[0] == v[0]:
        faults.append(f"batch {q[0]}, {k[0]}, {v[0]}")
    if k[1] != v[1] or q[1] % k[1]:
        faults.append(
            f"heads {q[1]}, {k[1]}, {v[1]}: q's must be a multiple of k's, v's the same as k's"
        )
    if k[2] != v[2]:
        faults.append(f"keys {k[2]} but values {v[2]}")
    if q[3] != k[3]:
        faults.append(f"head size {q[3]} of q but {k[3]} of k")
    if len({found[n].dtype for n in NAMES}) != 1:
        faults.append("dtypes " + ", ".join(str(found[n].dtype) for n in NAMES))
    if faults:
        raise TensorError(f"{where}: q {q}, k {k}, v {v} do not fit together: {'; '.join(faults)}")
