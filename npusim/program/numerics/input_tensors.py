"""Input tensors: drawn by a workload's recipe, head by head, or given by the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.config.problem import (
    SCALES,
    STORED,
    AmplifiedData,
    HybridData,
    NormalData,
    ResonanceData,
    SinkData,
    UniformData,
)
from npusim.errors import TensorError
from npusim.formats.cast import widen
from npusim.formats.float_format import format_of_dtype
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.problem import DataRecipe, Problem
    from npusim.program.ir.tile import GlobalTensor
    from npusim.program.numerics.executor import HeadSource

Array = NDArray[Any]
NAMES = ("q", "k", "v", "w_o")


def recipe_source(problem: Problem, seed: int | None = None) -> HeadSource:
    """Return a source of inputs drawn from the problem's recipe; the source stores them.

    Every head has its own generator, seeded by (seed, tensor, batch, head): a head's values are independent of the
    other heads that are computed.  Raises :class:`TensorError` for a recipe that changes tensors instead of drawing
    them.
    """
    recipe = problem.data
    if isinstance(recipe, AmplifiedData):
        raise TensorError(f"data: {recipe.kind} changes your tensors; pass some with --tensors")
    start = recipe.seed if seed is None else seed

    @cache
    def source(name: str, batch: int, head: int) -> Array:
        if name not in NAMES:
            known = f"the inputs of attention are {', '.join(NAMES)}"
            raise TensorError(f"input {name}: {known}; declare a kernel with other inputs with problem=KernelProblem")
        one, unit = problem.sequence(batch), getattr(problem, f"{name}_scale")
        what = repr(one.data), name, (start, NAMES.index(name), batch, head), _shape(one, name), one.scale
        make = _kept_head if math.prod(what[3]) <= KEPT_ELEMENTS else _kept_head.__wrapped__
        return make(one.data, what, unit, problem.dtype)

    return source


#: Number of drawn heads that are stored for further runs on the same inputs, and largest number of elements of such a
#: head.
KEPT_HEADS, KEPT_ELEMENTS = 128, 1 << 16


@lru_cache(maxsize=KEPT_HEADS)
def _kept_head(
    recipe: DataRecipe, what: tuple[str, str, tuple[int, ...], tuple[int, int], float], unit: float, dtype: str
) -> Array:
    """Return a drawn head divided by ``unit`` in a format, read-only.

    ``what``: the recipe as a text that distinguishes all numbers; the tensor; seeds; shape; and the scale of the
    scores.
    """
    _, name, seeds, shape, scale = what
    drawn = _draw(recipe, name, np.random.default_rng(seeds), shape, scale)
    values: Array = formats.cast(drawn if unit == 1.0 else drawn / unit, dtype)
    values.flags.writeable = False
    return values


def drawn_source(problem: Problem, recipe: HeadSource | None = None) -> HeadSource:
    """Return a source of inputs drawn by the problem's recipe, or a given source, in the problem's storage: in pages,
    or with V as a part of K.
    """
    source = with_filled_heads(stored_source(recipe or recipe_source(problem), problem), problem)
    if problem.page:
        source = paged(source, problem, drawn_pages(problem))
    if not problem.values_in_keys:
        return source
    cols = problem.value_head_dim
    return lambda name, batch, head: source("k", batch, head)[:, :cols] if name == "v" else source(name, batch, head)


def quantised(values: Array, fmt: str, rows: int | None = None, *, by_column: bool = False) -> tuple[Array, Array]:
    """Return values in a narrow format, with float32 scales: one scale for all values, or one for each group of
    ``rows`` rows.

    With ``by_column``: one scale for each column, (1, columns).

    A scale is float32(largest absolute value / largest finite value of ``fmt``), or 1 if that is 0; stored values are
    the quotients, rounded to nearest even and saturated.
    """
    wide = values.astype(np.float64)
    largest = np.abs(wide).max()
    if by_column:
        largest = np.abs(wide).max(0, keepdims=True)
    elif rows is not None:
        starts = range(0, len(wide), rows)
        largest = np.repeat(np.maximum.reduceat(np.abs(wide).max(1), starts), rows)[: len(wide), None]
    scales = (largest / formats.get_format(fmt).max_finite).astype(np.float32)
    scales = np.where(scales == 0, np.float32(1), scales)
    return formats.cast(wide / scales.astype(np.float64), fmt, overflow="saturate"), scales


def stored_source(source: HeadSource, problem: Problem) -> HeadSource:
    """Return the source with K and V as a cache stores them, and their scales; ``k`` and ``v`` are the stored values.

    This is exact: the float64 products of stored values and scales.
    """
    fmt = problem.cache
    if fmt is None:
        return source

    @cache
    def of_head(name: str, batch: int, head: int) -> tuple[Array, Array]:
        by_column = problem.cache_scale == "channel"
        return quantised(source(name, batch, head), fmt, problem.scaled_keys, by_column=by_column)

    def read(name: str, batch: int, head: int) -> Array:
        if name == "q":
            return source(name, batch, head)
        stored, scales = of_head(name[0], batch, head)
        if name in ("k", "v"):
            return stored.astype(np.float64) * scales.astype(np.float64)
        return stored if name.endswith(STORED) else scales

    return read


#: Numbers of the pages of each sequence, in the order of its keys.
PageTable = Sequence[Sequence[int]]


def drawn_pages(problem: Problem) -> PageTable:
    """Return a table of the pages of all sequences in an order that ``page_seed`` draws."""
    counts = [ceil_div(n, problem.page) for n in problem.keys]
    order = np.random.default_rng([problem.page_seed, problem.page]).permutation(sum(counts))
    return [part.tolist() for part in np.split(order, np.cumsum(counts)[:-1])]


def check_pages(table: PageTable, keys: Sequence[int], page: int, count: int) -> None:
    """Raise `TensorError` if pages of ``page`` keys do not contain sequences with these numbers of ``keys``.

    A page is one of ``count`` pages, at one position of one sequence.
    """
    owners: dict[int, int] = {}
    for number, (pages, length) in enumerate(zip(table, keys, strict=True)):
        needed = ceil_div(length, page)
        if len(pages) < needed:
            raise TensorError(f"page_table: sequence {number} has {len(pages)} pages; {length} keys need {needed}")
        for index in pages[:needed]:
            if not 0 <= index < count:
                raise TensorError(f"page_table: sequence {number}: there is no page {index}; allowed: 0 to {count - 1}")
            if index in owners:
                raise TensorError(f"page_table: page {index} occurs twice: in sequences {owners[index]} and {number}")
            owners[index] = number


def paged(source: HeadSource, problem: Problem, table: PageTable) -> HeadSource:
    """Return the source with K and V written into pages of memory and read back through the table."""
    check_pages(table, problem.keys, problem.page, sum(map(len, table)))
    memory: dict[tuple[str, int, int], Array] = {}

    def read(name: str, batch: int, head: int) -> Array:
        values = source(name, batch, head)
        # these are stored next to the pages
        if name == "q" or (name.endswith(SCALES) and problem.cache_scale == "channel"):
            return values
        for index, start in zip(table[batch], range(0, len(values), problem.page), strict=True):
            memory[name, head, index] = values[start : start + problem.page]
        return np.concatenate([memory[name, head, index] for index in table[batch]])

    return read


def projection_source(problem: Problem, heads: int, hidden: int) -> Callable[[int], Array]:
    """Return a source of the output projection's rows for one head of the layer's ``heads``.

    The shape is (value head size, ``hidden``). Values are normal with variance 1 / (heads x value head size), so that
    outputs are as large as the attention's; they are seeded as in `recipe_source` and rounded to the problem's format.
    """
    seed, width = getattr(problem.data, "seed", 0), heads * problem.value_head_dim

    def source(head: int) -> Array:
        rng = np.random.default_rng([seed, NAMES.index("w_o"), 0, head])
        drawn = rng.standard_normal((problem.value_head_dim, hidden), np.float32)
        return formats.cast(drawn / np.float32(np.sqrt(width)), problem.dtype)

    return source


def _draw(recipe: DataRecipe, name: str, rng: np.random.Generator, shape: tuple[int, int], scale: float) -> Array:
    """Return one head of tensor ``name``, ``shape``: (rows, dimension), in float32 or float64."""
    match recipe:
        case NormalData():
            narrow = rng.standard_normal(shape, np.float32)
            narrow *= np.float32(recipe.deviation)
            narrow += np.float32(recipe.mean)
            return narrow
        case UniformData():
            return rng.uniform(recipe.x0 - recipe.amplitude, recipe.x0 + recipe.amplitude, shape)
        case HybridData():
            values = recipe.x0 + rng.standard_normal(shape)
            is_outlier = rng.random(shape) < recipe.probability
            return values + np.where(is_outlier, recipe.amplitude * rng.standard_normal(shape), 0.0)
        case SinkData():
            return _sink(recipe, name, rng, shape, scale)
        case ResonanceData():
            return _resonance(recipe, name, rng, shape)
        case AmplifiedData():
            pass
    raise AssertionError(f"no generator for {recipe}")


def _shape(problem: Problem, name: str) -> tuple[int, int]:
    rows, (head, value) = problem.seq_q if name == "q" else problem.seq_kv, problem.filled
    return rows, problem.value_head_dim - value if name == "v" else problem.head_dim - head


def _sink(recipe: SinkData, name: str, rng: np.random.Generator, shape: tuple[int, int], scale: float) -> Array:
    values = rng.standard_normal(shape)
    if name == "q":
        # A query of length 1/scale has scaled scores of variance 1 on normal keys.
        values[:, :-1] /= scale * np.sqrt((values[:, :-1] ** 2).sum(axis=1, keepdims=True))
        values[:, -1] = 1.0
    if name == "k":
        values[:, -1] = 0.0
        values[: recipe.sinks, -1] = recipe.gap / scale
    return values


def _resonance(recipe: ResonanceData, name: str, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    values = rng.standard_normal(shape)
    if name == "v":
        return values
    angle: Array = 2 * np.pi * recipe.frequency * np.arange(shape[1]) / shape[1]
    if name == "k":
        angle -= np.deg2rad(recipe.phase_degrees)
    wave = np.array([math.cos(x) for x in angle])  # the result of numpy's function depends on the CPU
    return (recipe.query_amplitude if name == "q" else recipe.key_amplitude) * wave + recipe.deviation * values


def kernel_source(inputs: Sequence[GlobalTensor], seed: int, given: Mapping[str, Array] | None = None) -> HeadSource:
    """Return a source of the inputs of a kernel of plain tensors: the ``given`` tensors, else independent normal
    entries.

    A given tensor has the number of elements and the format of the launch; its shape is assumed to be that of the
    launch.  Raises :class:`TensorError` for other tensors, and if a tensor is missing.
    """
    by_name = {t.name: t for t in inputs}

    def stored(t: GlobalTensor, batch: int, head: int) -> Array:
        shape, fmt = t.stored_shape, formats.get_format(t.fmt)
        if given is None:
            rng = np.random.default_rng([seed, *t.name.encode(), batch, head])
            drawn = formats.cast(rng.standard_normal(shape[2:], np.float32), t.fmt)
            return drawn if t.view is None else np.asarray(t.view.drawn(drawn, (batch, head)))
        size = math.prod(shape)
        array = given.get(t.view.parameter if t.view else t.name, np.empty(0, fmt.dtype))
        if t.view is not None and array.size:
            array = t.view.array(array)
        if array.size != size or array.dtype != fmt.dtype:
            listed = ", ".join(f"{n} {a.dtype}{a.shape}" for n, a in given.items())
            raise TensorError(f"tensors: {t.name}: {size:,} elements of {t.fmt} are needed; got {listed}")
        matrix: Array = np.ascontiguousarray(array).reshape(shape)[batch, head]
        return matrix

    @cache
    def source(name: str, batch: int, head: int) -> Array:
        t = by_name[name]
        values = np.broadcast_to(stored(t, batch, head), (t.rows // t.packed, t.cols))
        return np.ascontiguousarray(values.T) if t.is_transposed else values

    return source


def with_followers(
    source: HeadSource, inputs: Sequence[GlobalTensor], follows: Mapping[str, Callable[[HeadSource, int, int], Array]]
) -> HeadSource:
    """Return the source with those inputs that are float64 functions of the others, by batch and head."""
    fmt = {t.name: t.fmt for t in inputs}

    def wide(name: str, batch: int, head: int) -> Array:
        return widen(read(name, batch, head)).astype(np.float64)

    @cache
    def read(name: str, batch: int, head: int) -> Array:
        follower = follows.get(name)
        return formats.cast(follower(wide, batch, head), fmt[name]) if follower else source(name, batch, head)

    return read


def array_source(tensors: Mapping[str, Array], recipe: DataRecipe | None = None) -> HeadSource:
    """Return a source that slices heads from (batch, heads, rows, cols) arrays.

    A recipe that changes tensors is applied to each head; other recipes do not change them.
    """
    if not isinstance(recipe, AmplifiedData):
        return lambda name, batch, head: tensors[name][batch, head]
    gain = recipe.gain

    def source(name: str, batch: int, head: int) -> Array:
        values = tensors[name][batch, head]
        return amplify_mean(values, gain) if name == "k" else values

    return source


def without_padding(source: HeadSource, problem: Problem) -> HeadSource:
    """Return the source with only the rows of each sequence, if lengths differ."""
    if not problem.lengths:
        return source
    rows = {"q": problem.queries, "k": problem.keys, "v": problem.keys}
    return lambda name, batch, head: source(name, batch, head)[: rows[name][batch]]


def with_filled_heads(source: HeadSource, problem: Problem) -> HeadSource:
    """Return the source with zeros in the columns that pad head sizes."""

    def read(name: str, batch: int, head: int) -> Array:
        values, count = source(name, batch, head), problem.filled[name[0] == "v"]
        has_columns = not name.endswith(SCALES) or problem.cache_scale == "channel"
        return np.pad(values, ((0, 0), (0, count))) if has_columns else values

    return read if any(problem.filled) else source


def hidden_keys(problem: Problem, batch: int) -> NDArray[np.bool_]:
    """Return which keys of a sequence no query sees, (keys,)."""
    one = problem.sequence(batch)
    hidden = np.ones(one.seq_kv, np.bool_)
    for first, end in one.seen.union(one.causal_offset, one.causal_offset + one.seq_q - 1):
        hidden[first:end] = False
    return hidden


def with_padding(source: HeadSource, problem: Problem) -> HeadSource:
    """Return the source with NaN in K and V where no query sees a key, except for formats without NaN."""

    def read(name: str, batch: int, head: int) -> Array:
        values, hidden = source(name, batch, head), hidden_keys(problem, batch)
        if name[0] not in "kv" or len(values) != len(hidden) or values.dtype.kind == "i":
            return values
        filled = values.copy()
        filled[hidden] = np.nan
        return filled

    return read


def amplify_mean(keys: Array, gain: float) -> Array:
    """Return ``(keys - mean) + gain mean``, the mean over the keys, in the keys' dtype."""
    wide = keys.astype(np.float64)
    mean = wide.mean(axis=0)
    fmt = format_of_dtype(keys.dtype)
    if fmt is None:
        raise TensorError(f"k: {keys.dtype} is not a known format")
    return formats.cast((wide - mean) + gain * mean, fmt)
