"""Reads Q, K and V from a user's files: safetensors or npz, by path or by packaged name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from npusim.config.messages import choices
from npusim.config.packaged import list_tensors, packaged_tensors
from npusim.config.problem import SCALED, AmplifiedData, Dtype
from npusim.errors import TensorError
from npusim.formats import cast, get_format
from npusim.formats.archives import MOST_BYTES, read_archive
from npusim.formats.float_format import format_of_dtype
from npusim.kernels.triton import is_recorded
from npusim.program.numerics.input_tensors import check_pages, hidden_keys, quantised
from npusim.sanitize import regular_file
from npusim.simulation.request import Layout
from npusim.units import ceil_div

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.config.problem import Problem
    from npusim.config.workload import Workload
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.bits_result import NumericResult
    from npusim.simulation.request import Request

Tensors = dict[str, "NDArray[Any]"]
#: Axes of each layout, by CANN's names for the inputs of its fused attention.
LAYOUT_AXES = MappingProxyType(
    {
        "bnsd": ("batch", "heads", "tokens", "head size"),
        "bsnd": ("batch", "tokens", "heads", "head size"),
        "bsh": ("batch", "tokens", "heads x head size"),
        "tnd": ("tokens of all sequences", "heads", "head size"),
    }
)
#: The layout with the same axes in which heads and tokens are exchanged.
OTHER_LAYOUT: Mapping[str, Layout] = MappingProxyType({"bnsd": "bsnd", "bsnd": "bnsd"})
NAMES = ("q", "k", "v")
#: Other names that frameworks use for these keys.
LONG_NAMES: Mapping[str, str] = MappingProxyType({"query": "q", "key": "k", "value": "v"})
#: Names in safetensors of formats that numpy does not have.
STORED = MappingProxyType({"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"})
#: Facts about a call that tensors state in addition to their values.
STATED = ("lengths", "query_lengths", "page")
#: Keys that are read in addition to those of Q, K and V: w_o on a node, an output by `diff`, and others for some
#: layouts.
BESIDE = ("bias", "w_o", "o", "out", "output")
OF_LAYOUT = MappingProxyType({"tnd": ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")})
DTYPES = get_args(Dtype)


def chosen_tensors(request: Request, load: Workload) -> tuple[Tensors | None, dict[str, float], dict[str, Any]]:
    """Return the given tensors, or the tensors that the workload's recipe changes; their scales; and fields of
    `Problem`.

    The fields are ``lengths`` and ``query_lengths`` if sequences differ, ``page`` if K and V are pages, and the kind of
    a ``bias``, whose values are returned with the tensors.

    Returns None if the recipe draws the tensors.  The request's ``dtype`` rounds the tensors to that format, to nearest
    and ties to even; a float8 format has one scale per tensor (`quantise`).

    Raises `TensorError` as `load_tensors` does, and if a value exceeds the range of ``dtype`` or the tensors do not
    match the named workload.
    """
    r, dtype = request, request.dtype
    if r.tensors is not None:
        lengths = r.lengths or ()
        tensors = load_tensors(
            r.tensors, prefix=r.tensor_prefix, layout=r.layout, head_dim=load.head_dim, lengths=lengths
        )
        if r.workload is not None:
            _check_workload(tensors, load, r.layout)
    elif load.tensors is None or not load.data.changes_tensors:
        return None, {}, {}
    else:
        tensors = load_tensors(load.tensors.file, prefix=load.tensors.prefix)
    stated: dict[str, Any] = {n: tensors.pop(n).tolist() for n in STATED if n in tensors}
    if "bias" in tensors:
        stated["bias"] = "shared" if len(tensors["bias"]) == 1 else "head"
        if r.bias not in (None, stated["bias"]):
            raise TensorError(f"bias: {r.bias}, but the tensors have a bias of shape {tensors['bias'].shape}")
    if dtype in SCALED:
        bias = {n: tensors.pop(n) for n in ("bias",) if n in tensors}
        check_finite(tensors)  # a scale must apply to all values
        stored, scales = quantise(tensors, dtype)
        return stored | _rounded(bias, dtype), scales, stated
    return (tensors if dtype is None else _rounded(tensors, dtype)), {}, stated


def unlikely_reading(tensors: Tensors, layout: Layout) -> str:
    """Return a note on the layout in which tensors were read, if the layout with heads and tokens exchanged is
    likelier.

    The note is empty if there are at most as many heads as keys, if no other layout has the same axes, or if the heads
    of Q would not be a multiple of those of K.
    """
    other = OTHER_LAYOUT.get(layout)
    (_, heads, queries, _), (_, kv_heads, keys, _) = (tensors[n].shape for n in "qk")
    if other is None or heads <= keys or queries % keys:
        return ""
    axes = ", ".join(LAYOUT_AXES[layout])
    return (
        f"tensors: interpreted as {heads:,} heads of {keys:,} keys (layout {layout}: {axes}); with --layout "
        f"{other} they have {queries:,} heads of {kv_heads:,} keys"
    )


def kernel_tensors(request: Request) -> Tensors | None:
    """Return the user's inputs of a kernel of plain tensors by the names of its parameters; None if there are no such
    inputs.

    For a recorded call, the inputs are those of the recording, if their values were recorded.

    Raises `TensorError` for a file that is damaged.
    """
    given = request.tensors
    if given is None and is_recorded(request.schedule):
        from npusim.kernels.triton.calls import call_of

        return call_of(request.schedule).floats()
    if given is None or isinstance(given, Mapping):
        return None if given is None else {n: np.asarray(x) for n, x in given.items()}
    return read_tensors(Path(given))


def _check_workload(tensors: Tensors, load: Workload, layout: Layout) -> None:
    """Raise `TensorError` for tensors that cannot be some heads of a workload's."""
    q, k, v = (tensors[n].shape for n in NAMES)
    # if there are more devices than KV heads, they divide a group
    shares = load.heads // load.kv_heads % (q[1] // k[1]) == 0
    if not shares or q[1] > load.heads or (q[3], v[3]) != (load.head_dim, load.value_head_dim):
        unlikely = unlikely_reading(tensors, layout)
        raise TensorError(
            f"tensors: {q[1]} query heads of {q[3]} and {k[1]} of keys do not match workload {load.name}, which "
            f"has {load.heads} of {load.head_dim} and {load.kv_heads}; remove the workload, or name the one "
            "of the tensors" + (f"; {unlikely}" if unlikely else "")
        )


def _rounded(tensors: Tensors, dtype: str) -> Tensors:
    rounded = {name: cast(values.astype(np.float64), dtype) for name, values in tensors.items()}
    for name, values in rounded.items():
        lost = ~np.isfinite(values) & np.isfinite(tensors[name])  # E4M3 has no Inf; the result is NaN
        if lost.any():
            first = tuple(int(i[0]) for i in np.nonzero(lost))
            raise TensorError(
                f"dtype: {int(lost.sum())} values of {name} are beyond {dtype}'s largest, "
                f"{get_format(dtype).max_finite:g}; the first is {tensors[name][first]!s} at {first}"
            )
    return rounded


def load_tensors(
    source: str | Path | Mapping[str, NDArray[Any]],
    *,
    prefix: str = "",
    layout: Layout = "bnsd",
    head_dim: int | None = None,
    lengths: Sequence[int] = (),
) -> Tensors:
    """Return ``{"q", "k", "v"}`` as (batch, heads, tokens, head size), each of one of `DTYPES`.

    Sequences of unequal length are padded with zeros, and their ``"lengths"`` in keys are returned too.
    ``"query_lengths"`` are returned if some sequences have fewer queries than the longest one, or fewer queries than
    keys.

    ``source`` is a path, the name of packaged data, or a mapping.  Keys are ``q k v`` or ``<prefix>.q ...``; without
    ``prefix``, the file must have one set of keys.

    ``layout`` is the order of axes in ``source``, by CANN's names: ``bnsd``; ``bsnd``; ``bsh``, where ``head_dim`` cuts
    the last axis into heads; ``tnd``, all tokens in one axis.  With ``tnd`` a key ``cu_seqlens`` (or ``cu_seqlens_q``
    and ``cu_seqlens_k``), besides the tensors' keys, contains the ends of the sequences; without this key, ``lengths``
    states their lengths, or there is one sequence.  In other layouts ``lengths`` are the numbers of keys of each
    sequence without padding.  With a key ``page_table`` (sequences, pages) K and V are pages: (pages, keys of a page,
    heads, head size) in ``bsnd``, heads before keys in ``bnsd``; ``lengths`` or a key ``cache_seqlens`` states the
    number of keys of each sequence, and ``"page"`` is returned too.  A key ``bias``, (query heads or 1, queries, keys)
    in the format of Q, is added to scaled scores, and is returned unchanged.

    Raises `TensorError` if the file is missing, truncated or has unknown keys, if shapes do not match one another, the
    layout or the lengths, or if a dtype is not in `DTYPES`.  NaN and Inf are accepted here; see `check_finite`.
    """
    where = "tensors" if isinstance(source, Mapping) else str(source)
    raw = _short(dict(source) if isinstance(source, Mapping) else read_tensors(Path(source)), where)
    if layout not in get_args(Layout):
        raise TensorError(f"layout {layout!r}; allowed: {', '.join(get_args(Layout))}")
    tensors, chosen = _pick(raw, prefix, where)
    _check_keys(raw, chosen, layout, where)
    page = 0
    if (table := raw.get(f"{chosen}page_table", raw.get("page_table"))) is not None:
        lengths = tuple(int(n) for n in (lengths or raw.get(f"{chosen}cache_seqlens", raw.get("cache_seqlens", ()))))
        page, gathered = _gathered({n: tensors[n] for n in "kv"}, np.asarray(table), lengths, layout, where)
        tensors |= gathered
    rows: dict[str, tuple[int, ...]] = {}
    for name, values in tensors.items():
        if not isinstance(values, np.ndarray):
            kind = type(values).__name__
            raise TensorError(f"{where}: {name} is a {kind}; must be a numpy array")
        ends = _sequence_ends(raw, chosen, name) if layout == "tnd" else None
        if layout == "tnd" and lengths:
            ends = _ends_of_lengths(name, values, lengths, ends, where)
        tensors[name] = _as_bnsd(name, values, layout, where, head_dim=head_dim, ends=ends)
        rows[name] = () if ends is None else tuple(int(n) for n in np.diff(ends, prepend=0))
    for name, values in tensors.items():
        _check(name, values, where)
    _check_together(tensors, layout, where)
    if lengths and layout != "tnd":
        rows = {"q": (), "k": tuple(lengths), "v": tuple(lengths)}
    tensors = _of_lengths(tensors, rows, where)
    if (bias := raw.get(f"{chosen}bias")) is not None:
        tensors["bias"] = _checked_bias(bias, tensors, f"{where}: {chosen}bias")
    return {**tensors, "page": np.array(page)} if page else tensors


def _check_keys(raw: Mapping[str, Any], chosen: str, layout: str, where: str) -> None:
    """Raise `TensorError` for a key that is not read and that belongs to no other set of Q, K and V in the file."""
    paged = ("page_table", "cache_seqlens") if "page_table" in raw else ()
    known = (*NAMES, *BESIDE, *OF_LAYOUT.get(layout, ()), *paged)
    others = tuple(k[:-1] for k in raw if k.endswith(".q") and k[:-1] != chosen)
    for key in raw:
        if key.removeprefix(chosen) not in known and key not in known and not key.startswith(others):
            raise TensorError(f"{where}: npusim does not read key {key!r}{choices(key, known)}")


def _checked_bias(bias: NDArray[Any], tensors: Tensors, where: str) -> NDArray[Any]:
    """Return a bias of scores; raise `TensorError` for a shape or format that the scores cannot have."""
    _check("bias", bias, where)
    q, k = tensors["q"], tensors["k"]
    if bias.shape not in [(heads, q.shape[2], k.shape[2]) for heads in (1, q.shape[1])] or bias.dtype != q.dtype:
        wanted = f"({q.shape[1]} or 1, {q.shape[2]}, {k.shape[2]}) {q.dtype}"
        raise TensorError(f"{where} is {bias.shape} {bias.dtype}; must be (query heads, queries, keys): {wanted}")
    return bias


def _gathered(
    pools: Tensors, table: NDArray[Any], lengths: Sequence[int], layout: str, where: str
) -> tuple[int, Tensors]:
    """Return the keys of a page, and K and V of each sequence, gathered by a page table and padded with zeros."""
    shapes = {x.shape[:3] for x in pools.values()}
    if (
        layout not in ("bnsd", "bsnd")
        or len(shapes) != 1
        or any(x.ndim != len(LAYOUT_AXES["bnsd"]) for x in pools.values())
    ):
        raise TensorError(f"{where}: page_table needs k and v of (pages, page, heads, size) in layout bsnd, or bnsd")
    if table.ndim != len(("sequences", "pages")) or len(table) != len(lengths) or min(lengths, default=0) < 1:
        raise TensorError(
            f"{where}: page_table has shape {table.shape}; npusim knows the lengths of {len(lengths)} sequences"
        )
    along = 1 if layout == "bsnd" else 2
    count, page = pools["k"].shape[0], pools["k"].shape[along]
    check_pages(table.tolist(), lengths, page, count)
    gathered: Tensors = {}
    for n, pool in pools.items():
        by_key = np.moveaxis(pool, along, 1)
        out = np.zeros((len(lengths), max(lengths), *by_key.shape[2:]), pool.dtype)
        for number, length in enumerate(lengths):
            rows = by_key[table[number, : ceil_div(length, page)]].reshape(-1, *by_key.shape[2:])
            out[number, :length] = rows[:length]
        gathered[n] = np.moveaxis(out, 1, along)
    return page, gathered


def _ends_of_lengths(
    name: str, values: NDArray[Any], lengths: Sequence[int], ends: NDArray[Any] | None, where: str
) -> NDArray[Any]:
    """Return the ends of packed sequences, given their numbers of keys; each has as many queries as keys, or all have
    the same number of queries.
    """
    wanted, tokens = np.cumsum(lengths), len(values)
    if name == "q" and tokens != wanted[-1] and tokens % len(lengths) == 0:
        wanted = np.arange(1, len(lengths) + 1) * (tokens // len(lengths))
    if tokens != wanted[-1] or (ends is not None and not np.array_equal(ends, wanted)):
        stated = "" if ends is None else f", and cu_seqlens {' '.join(map(str, ends[:8]))}"
        listed = ",".join(map(str, lengths[:8]))
        raise TensorError(f"{where}: lengths {listed} add up to {wanted[-1]} tokens, but {name} has {tokens}{stated}")
    return wanted


def _of_lengths(tensors: Tensors, rows: Mapping[str, tuple[int, ...]], where: str) -> Tensors:
    """Return the tensors, with the keys of each sequence as ``"lengths"`` if they differ."""
    keys, queries = rows["k"], rows["q"]
    batch, longest = tensors["k"].shape[0], tensors["k"].shape[2]
    if len(set(keys)) < 2 and len(set(queries)) < 2 and (not keys or keys[0] == longest):
        return tensors
    if rows["v"] != keys or len(keys) != batch or max(keys) > longest:
        raise TensorError(
            f"{where}: lengths has {len(keys)} sequences with at most {max(keys)} keys; k has {batch} with {longest}"
        )
    is_mixed = bool(queries) and queries != tuple(min(tensors["q"].shape[2], n) for n in keys)
    cut = {n: x if n == "q" else x[:, :, : max(keys)] for n, x in tensors.items()}
    return {**cut, "lengths": np.array(keys), **({"query_lengths": np.array(queries)} if is_mixed else {})}


def load_projection(
    source: str | Path | Mapping[str, NDArray[Any]] | None, prefix: str, beside: Mapping[str, NDArray[Any]] | None
) -> NDArray[Any] | None:
    """Return the output projection ``w_o``, (heads x head size, hidden), in ``beside``, the format of Q, K and V.

    A layer's output is ``O w_o``, with the heads in order in the columns of O.  The result is None if there is no
    projection.  Raises `TensorError` for another shape, a NaN or Inf, or a value beyond the range of the format.
    """
    if source is None or beside is None:
        return None
    width, dtype = beside["q"].shape[1] * beside["v"].shape[3], str(beside["q"].dtype)
    where = "tensors" if isinstance(source, Mapping) else str(source)
    raw = _short(dict(source) if isinstance(source, Mapping) else read_tensors(Path(source)), where)
    key = f"{_pick(raw, prefix, where)[1]}w_o"
    if key not in raw:
        return None
    projection = raw[key]
    _check(key, projection, where)
    check_finite({key: projection})
    if projection.ndim != 2 or projection.shape[0] != width:
        turned = "; this one is transposed" if projection.ndim == 2 and projection.shape[1] == width else ""
        raise TensorError(
            f"{where}: {key} has shape {projection.shape}; must be (heads x head size, hidden) = ({width}, "
            f"hidden){turned}"
        )
    return _rounded({key: projection}, dtype)[key]


def read_tensors(path: Path) -> Tensors:
    """Return the arrays of a tensor file or of packaged data; raise `TensorError` if it is damaged."""
    if not path.exists():
        packaged = packaged_tensors(str(path))
        if packaged is None:
            known = ", ".join(list_tensors())
            raise TensorError(f"{path}: no such file, and no packaged tensors of that name; packaged: {known}")
        path = packaged
    try:
        if path.suffix == ".npz":
            return read_archive(path)
        from safetensors import deserialize

        stored = deserialize(regular_file(path, MOST_BYTES, TensorError).read_bytes())  # type: ignore[no-untyped-call]
        return {name: _stored(name, tensor) for name, tensor in stored}
    except TensorError:
        raise
    except ValueError as error:
        what = "holds pickled objects, which are refused" if "pickle" in str(error) else f"damaged: {error}"
        raise TensorError(f"{path}: {what}") from None
    except Exception as error:  # noqa: BLE001 - the readers' errors differ by version
        raise TensorError(f"{path}: not a readable tensor file, or truncated: {error}") from None


def _stored(name: str, tensor: Mapping[str, Any]) -> NDArray[Any]:
    """Return an array of a safetensors file; the package's reader asks numpy for formats that numpy does not have."""
    kind = tensor["dtype"]
    if kind not in STORED and not re.fullmatch(r"[FIU](8|16|32|64)", kind):
        raise ValueError(f"{name} is {kind}, which is not supported")
    dtype = get_format(STORED[kind]).dtype if kind in STORED else np.dtype(f"{kind[0].lower()}{int(kind[1:]) // 8}")
    return np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])


def _short(raw: Mapping[str, NDArray[Any]], where: str) -> dict[str, NDArray[Any]]:
    """Return arrays with the keys ``q k v`` in place of `LONG_NAMES`; raise `TensorError` if a file has both."""
    renamed: dict[str, NDArray[Any]] = {}
    for key, values in raw.items():
        path, dot, name = key.rpartition(".")
        short = f"{path}{dot}{LONG_NAMES.get(name, name)}"
        if short != key and short in raw:
            raise TensorError(f"{where}: has both {short!r} and {key!r} for the same tensor; remove one of them")
        renamed[short] = values
    return renamed


def _pick(raw: Mapping[str, NDArray[Any]], prefix: str, where: str) -> tuple[Tensors, str]:
    if prefix:
        keys = {n: f"{prefix}.{n}" for n in NAMES}
    elif all(n in raw for n in NAMES):
        keys = {n: n for n in NAMES}
    else:
        prefixes = [k[: -len(".q")] for k in raw if k.endswith(".q")]
        if len(prefixes) != 1:
            listed = ", ".join(sorted(raw)) or "none"
            wanted = "keys q, k, v (or query, key, value) or one <prefix>.q, .k, .v"
            raise TensorError(f"{where}: needs {wanted}; it has {listed}")
        keys = {n: f"{prefixes[0]}.{n}" for n in NAMES}
    missing = [k for k in keys.values() if k not in raw]
    if missing:
        raise TensorError(f"{where}: no key {missing[0]!r}; it has {', '.join(sorted(raw))}")
    return {n: raw[k] for n, k in keys.items()}, keys["q"].removesuffix("q")


def _as_bnsd(
    name: str, values: NDArray[Any], layout: str, where: str, *, head_dim: int | None, ends: NDArray[Any] | None
) -> NDArray[Any]:
    """Return a view of one tensor with axes (batch, heads, tokens, head size)."""
    axes = LAYOUT_AXES[layout]
    if values.ndim != len(axes):
        raise TensorError(
            f"{where}: {name} has shape {values.shape}; layout {layout} has {len(axes)} axes ({', '.join(axes)})"
        )
    if layout == "bnsd":
        return values
    if layout == "bsh":
        width = values.shape[2]
        if head_dim is None or width % head_dim:
            size = "none is known" if head_dim is None else f"{head_dim}, the workload's"
            raise TensorError(
                f"{where}: {name} has {width} columns; layout bsh needs a head size that divides them: {size}"
            )
        values = values.reshape(*values.shape[:2], width // head_dim, head_dim)
    if layout == "tnd":
        count = 1 if ends is None else len(ends)
        lengths = [len(values)] if ends is None else [int(n) for n in np.diff(ends, prepend=0)]
        if min(lengths) < 1 or sum(lengths) != len(values):
            listed = " ".join(str(n) for n in lengths[:8])
            raise TensorError(
                f"{where}: {name} has {len(values)} tokens in sequences of {listed}; each must have at least one, "
                "and together they must be all tokens"
            )
        packed, values = values, np.zeros((count, max(lengths), *values.shape[1:]), values.dtype)
        for number, (start, length) in enumerate(zip(np.cumsum([0, *lengths]), lengths, strict=False)):
            values[number, :length] = packed[start : start + length]
    return values.transpose(0, 2, 1, 3)


def _sequence_ends(raw: Mapping[str, NDArray[Any]], prefix: str, name: str) -> NDArray[Any] | None:
    """Return where each sequence of packed tokens ends; None if the file does not state it."""
    letter = "q" if name == "q" else "k"
    for key in (f"{prefix}cu_seqlens_{letter}", f"{prefix}cu_seqlens", "cu_seqlens"):
        if key in raw:
            ends = np.asarray(raw[key]).reshape(-1)
            return ends[1:] if len(ends) and ends[0] == 0 else ends
    return None


def quantise(tensors: Tensors, fmt: str = "float8_e4m3fn") -> tuple[Tensors, dict[str, float]]:
    """Return the tensors in a narrow format and ``{"q_scale": ..., ...}``, one scale per tensor.

    A scale is float32(largest absolute value / largest finite value of ``fmt``), so that the whole range is used
    (per-tensor "amax" scaling); stored values are the quotients, rounded to nearest even and saturated.  A tensor of
    zeros, or one that is already in ``fmt``, has the scale 1.
    """
    stored, scales = {}, {}
    for name, values in tensors.items():
        is_done = values.dtype == get_format(fmt).dtype
        stored[name], scale = (values, np.float32(1)) if is_done else quantised(values, fmt)
        scales[f"{name}_scale"] = float(scale)
    return stored, scales


def _check(name: str, values: NDArray[Any], where: str) -> None:
    if values.dtype.type is np.void:
        raise TensorError(
            f"{where}: {name} is {values.dtype}: .npz stores the bits of bfloat16 and float8_e4m3fn, but not the "
            "format's name; save .safetensors, or save float32 and use --dtype bfloat16"
        )
    if not values.size:
        raise TensorError(f"{where}: {name} has shape {values.shape}, which is empty")
    fmt = format_of_dtype(values.dtype)
    if fmt is None or fmt.name not in DTYPES:
        raise TensorError(f"{where}: {name} is {values.dtype}; must be {' or '.join(DTYPES)}")


def check_finite(
    tensors: Mapping[str, NDArray[Any]], problem: Problem | None = None, where: object = "tensors"
) -> None:
    """Raise `TensorError` for NaN or Inf, except in keys of K and V that no query of ``problem`` sees."""
    for name, values in tensors.items():
        is_read = np.ones(values.shape, np.bool_)
        if problem is not None and name in ("k", "v") and not isinstance(problem.data, AmplifiedData):
            for batch in range(len(values) if problem.cache is None else 0):
                hidden = hidden_keys(problem, batch)
                is_read[batch, :, : len(hidden)][:, hidden] = is_read[batch, :, len(hidden) :] = False
        for what, is_bad in (("NaN", np.isnan), ("Inf", np.isinf)):
            if (bad := is_bad(values) & is_read).any():
                first = tuple(int(i[0]) for i in np.nonzero(bad))
                seen = ", which a query sees" if problem is not None and name in ("k", "v") else ""
                raise TensorError(f"{where}: {name} has {int(bad.sum())} {what}, the first at {first}{seen}")


def _check_together(tensors: Tensors, layout: str, where: str) -> None:
    q, k, v = (tensors[n].shape for n in NAMES)
    faults = []
    if not q[0] == k[0] == v[0]:
        faults.append(f"batch {q[0]}, {k[0]}, {v[0]}")
    if k[1] != v[1] or q[1] % k[1]:
        faults.append(
            f"heads {q[1]}, {k[1]}, {v[1]}: the heads of q must be a multiple of those of k, and v must "
            "have as many as k"
        )
    if k[2] != v[2]:
        faults.append(f"keys {k[2]} but values {v[2]}")
    if q[3] != k[3]:
        faults.append(f"head size {q[3]} of q but {k[3]} of k")
    if len({tensors[n].dtype for n in NAMES}) != 1:
        faults.append("dtypes " + ", ".join(str(tensors[n].dtype) for n in NAMES))
    if faults:
        read = f"with layout {layout}, (batch, heads, tokens, head size)"
        raise TensorError(f"{where}: q {q}, k {k}, v {v}, {read}, do not match: {'; '.join(faults)}")


def padding_note(problem: Problem, bits: NumericResult) -> str:
    """Return the number of keys with NaN that no query sees, and the output rows to which the NaN propagates."""
    batches = sorted({batch for batch, _, _ in bits.rows})
    count, of = (sum(f(hidden_keys(problem, b)) for b in batches) for f in (np.count_nonzero, len))
    reached = {at: np.flatnonzero(np.isnan(o).any(axis=1)) for at, o in bits.rows.items()}
    lines = [f"batch {b} head {h} row {row + rows[0]}" for (b, h, row), rows in reached.items() if len(rows)]
    total, rows = sum(map(len, reached.values())), sum(map(len, bits.rows.values()))
    which = f"{total} of {rows} rows of the output, first {lines[0]}" if lines else f"none of {rows} rows of the output"
    unread = problem.batch * problem.seq_kv - problem.key_count
    beyond = f"; no tile reads the {unread} keys beyond lengths" if problem.lengths else ""
    return f"padding: NaN in the {count} of {of} keys that no query sees reaches {which}{beyond}"


def inputs_notes(program: TileProgram, given: Tensors | None, bits: NumericResult) -> tuple[str, ...]:
    """Return a note on each of the user's inputs with values that are not finite, if outputs are not finite either.

    The note names the input, its first such value, and the operation where NaN begins.
    """
    if bits.error.is_finite or given is None:
        return ()
    read = dict.fromkeys(t.view.parameter if t.view else t.name for t in program.tensors.values() if t.role == "input")
    first = next((f", first {event}" for event in bits.first_events if event.kind == "nan"), "")
    lost = f"{bits.nan_count + bits.inf_count:,} of {bits.count:,} outputs are NaN or Inf{first}"
    notes = []
    for name in (n for n in read if n in given):
        bad = ~np.isfinite(given[name])
        if bad.any():
            at = tuple(int(i[0]) for i in np.nonzero(bad))
            count = f"{int(bad.sum()):,} of {bad.size:,} values not finite"
            notes.append(f"input {name} = {given[name][at]} at {at}, {count}: {lost}")
    return tuple(notes)
