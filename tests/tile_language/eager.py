"""Runs the text of a TileLang-Ascend kernel as Python on arrays in float64: the oracle of what npusim reads.

Nothing of the reader is used beside the loading of files.  The matrix core and both vector cores of an expert kernel
are threads with buffers of their own, and flags between cores are semaphores; without ``T.Scope`` both vector cores run
all statements side by side, one copy at a time.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.kernels.tilelang.program import TensorType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from npusim.kernels.tilelang.program import Language, PrimFunc

Array = np.ndarray[Any, Any]
SECONDS = 20
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "abs": np.abs,
}
FUNCTIONS |= {"ln": np.log, "rsqrt": lambda x: 1 / np.sqrt(x), "round": np.rint, "reciprocal": lambda x: 1 / x}
FUNCTIONS |= {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "silu": lambda x: x / (1 + np.exp(-x))}
FUNCTIONS |= {"relu": lambda x: np.maximum(x, 0)}
OF_TWO = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
OF_TWO |= {"max": np.maximum, "min": np.minimum}
COMPARISONS = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal}
COMPARISONS |= {"GT": np.greater, "GE": np.greater_equal}
QUIET = {"set_flag", "wait_flag", "barrier_all", "pipe_barrier", "annotate_layout", "annotate_address", "printf"}
QUIET |= {"dump_tensor", "print", "func_attr", "sync_block_set", "sync_block_wait"}


class Part(np.lib.mixins.NDArrayOperatorsMixin):
    """A view of a buffer; ``start``: of an element, which in a copy is the first one of a block."""

    def __init__(self, view: Array, owner: Buffer, start: tuple[int, ...] = ()) -> None:
        self.view, self.owner, self.start = view, owner, start

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.asarray(self.view, dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        return getattr(ufunc, method)(*(np.asarray(x) if isinstance(x, Part) else x for x in inputs), **named)

    def __index__(self) -> int:
        return int(self.view)

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.view)

    def __bool__(self) -> bool:
        return bool(self.view)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.shape)


class Buffer:
    """An array of a core, or a tensor; whole numbers stay whole."""

    def __init__(self, data: Array, dtype: str, *, is_global: bool) -> None:
        self.data, self.dtype, self.is_global = data, dtype, is_global

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        if any(isinstance(np.asarray(x) if isinstance(x, Part) else x, np.ndarray) and np.ndim(x) for x in entries):
            return self.data[tuple(entries)]
        entries = tuple(x if isinstance(x, slice) else int(x) for x in entries)
        whole = all(not isinstance(x, slice) for x in entries) and len(entries) == len(self.shape)
        firsts = tuple(int(x.start or 0) if isinstance(x, slice) else x for x in entries)
        ends = [
            n if isinstance(x, slice) and x.stop is None else int(x.stop) if isinstance(x, slice) else x + 1
            for x, n in zip(entries, self.shape, strict=False)
        ]
        if self.is_global and not whole and any(end > n for end, n in zip(ends, self.shape, strict=False)):
            missing = len(self.shape) - len(entries)
            extent = (*(end - a for a, end in zip(firsts, ends, strict=True)), *self.shape[len(entries) :])
            return Part(np.zeros(extent), self, (*firsts, *(0,) * missing))  # beyond the tensor: a block
        view = self.data[tuple(slice(x, x + 1) if not isinstance(x, slice) else x for x in entries)]
        if whole:
            return Part(view.reshape(()) if view.size else view, self, entries)
        return Part(view, self)

    def __setitem__(self, index: Any, value: Any) -> None:
        entries = index if isinstance(index, tuple) else (index,)
        self.data[tuple(np.asarray(x) if isinstance(x, Part) else x for x in entries)] = rounded(value, self.dtype)


def rounded(x: Any, dtype: str) -> Any:
    """Return numbers as a buffer of whole numbers has them."""
    return np.trunc(np.asarray(x)) if "int" in dtype else np.asarray(x)


def array(x: Any) -> Array:
    """Return an operand's numbers."""
    return x.data if isinstance(x, Buffer) else x.view if isinstance(x, Part) else np.asarray(x)


def plain(x: Array) -> Array:
    """Return an array without axes of one element."""
    return x.reshape([n for n in x.shape if n != 1])


class Core:
    """One core's execution of a kernel."""

    def __init__(self, name: str, number: int, group: Group) -> None:
        self.name, self.number, self.group, self.scope = name, number, group, ""

    @property
    def is_idle(self) -> bool:
        return bool(self.scope) and self.scope != self.name[0]

    def word(self, name: str) -> Any:
        if name in QUIET:
            return lambda *_, **__: None
        if name.startswith("alloc_"):
            return lambda shape, dtype="float32", *_, **__: Buffer(
                np.full(tuple(shape) if isinstance(shape, tuple | list) else (shape,), np.nan), dtype, is_global=False
            )
        if name.startswith("reduce_"):
            return lambda *a, **k: self.reduced(name.removeprefix("reduce_"), *a, **k)
        if name == "tile":
            return Tile(self)
        if name in FUNCTIONS:
            return lambda x: FUNCTIONS[name](array(x))
        return getattr(self, f"word_{name}")

    # ------------------------------------------------------------ frames
    @contextmanager
    def word_Kernel(self, *grid: int, threads: Any = None, **_: Any) -> Iterator[Any]:
        self.group.grid = grid
        numbers = np.unravel_index(self.group.program, grid)
        made = [int(n) for n in numbers] + ([self.number] if threads is None else [])
        yield tuple(made) if len(made) > 1 else made[0]

    @contextmanager
    def word_Scope(self, scope: str) -> Iterator[None]:
        before, self.scope = self.scope, scope
        yield
        self.scope = before

    def word_serial(self, *bounds: Any, **_: Any) -> range:
        return range(*(int(b) for b in bounds))

    word_Pipelined = word_unroll = word_serial

    def word_Parallel(self, *sizes: int, **_: Any) -> Iterator[Any]:
        axes = np.meshgrid(*(np.arange(n) for n in sizes), indexing="ij")
        yield axes[0] if len(axes) == 1 else tuple(axes)

    def word_Persistent(self, sizes: Sequence[int], cores: int, core: int) -> Iterator[Any]:
        for task in range(core, int(np.prod(sizes)), cores):
            yield tuple(int(i) for i in np.unravel_index(task, sizes))

    # ------------------------------------------------------------ words
    def word_copy(
        self, source: Any, target: Any, *, transpose: bool = False, enable_relu: bool = False, pad_value: Any = None
    ) -> None:
        if self.is_idle:
            return
        is_shared = any(getattr(getattr(x, "owner", x), "is_global", False) for x in (source, target))
        with self.group.together(is_shared):
            a, where = self.block(source, target), self.block(target, source)
            x = a.numbers(0.0 if pad_value is None else pad_value)
            x = np.maximum(x, 0) if enable_relu else x
            where.store(x.T if transpose else x)

    def block(self, x: Any, other: Any) -> Block:
        if isinstance(x, Part) and x.start and np.shape(x.view):
            return Block(x.owner, x.start, np.shape(x.view))
        if isinstance(x, Part) and x.start and not (isinstance(other, Part) and other.start):
            return Block(x.owner, x.start, np.shape(array(other)))
        return Block(x, (), np.shape(array(x)))

    def word_gemm_v0(
        self, a: Any, b: Any, c: Any, transpose_A: bool = False, transpose_B: bool = False, init: Any = False
    ) -> None:
        if self.is_idle:
            return
        x, y = (array(z).reshape(np.shape(array(z))[-2:]) for z in (a, b))
        made = (x.T if transpose_A else x) @ (y.T if transpose_B else y)
        to = array(c)
        to[...] = made.reshape(to.shape) + (0 if bool(init) else to)

    word_gemm_v1 = word_gemm_v0

    def word_mma(self, a: Any, b: Any, c: Any, init: Any = False) -> None:
        self.word_gemm_v0(a, b, c, init=init)

    def reduced(self, word: str, source: Any, target: Any, dim: Any = -1, clear: bool = True, **_: Any) -> None:
        if self.is_idle:
            return
        x, to = array(source), array(target)
        functions: dict[str, Callable[..., Array]] = {"sum": np.sum, "max": np.max, "min": np.min}
        made = functions[word](x, axis=int(dim)).reshape(to.shape)
        to[...] = made if clear else {"sum": np.add, "max": np.maximum, "min": np.minimum}[word](made, to)

    def word_set_cross_flag(self, _pipe: Any, number: int, mode: int = 2) -> None:
        if not self.is_idle:
            self.group.set(self.name, number)

    def word_wait_cross_flag(self, number: int, _pipe: Any = "") -> None:
        if not self.is_idle:
            self.group.wait(self.name, number)

    def word_fill(self, target: Any, value: Any) -> None:
        Tile(self).fill(target, value)

    def word_clear(self, target: Any) -> None:
        Tile(self).fill(target, 0.0)

    def word_ceildiv(self, a: int, b: int) -> int:
        return -(-int(a) // b)

    def word_if_then_else(self, condition: Any, a: Any, b: Any) -> Any:
        made = np.where(array(condition), array(a), array(b))
        return made if made.shape else made.item()

    word_Select = word_if_then_else

    def word_max(self, a: Any, b: Any) -> Any:
        return np.maximum(array(a), array(b))

    def word_min(self, a: Any, b: Any) -> Any:
        return np.minimum(array(a), array(b))

    def word_And(self, *x: Any) -> Any:
        return np.logical_and.reduce(x)

    def word_Or(self, *x: Any) -> Any:
        return np.logical_or.reduce(x)

    def word_Not(self, x: Any) -> Any:
        return np.logical_not(x)

    def word_infinity(self, _fmt: Any) -> float:
        return float("inf")

    def word_cast(self, x: Any, fmt: str) -> Any:
        return rounded(array(x), str(fmt))

    def word_Cast(self, fmt: str, x: Any) -> Any:
        return self.word_cast(x, fmt)

    def word_use_swizzle(self, number: Any, *_: Any, **__: Any) -> Any:
        return number


class Block:
    """Elements from a first one on, which may lie outside of the tensor: read as 0, and not stored."""

    def __init__(self, of: Any, start: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.of, self.start, self.shape = of, start, shape
        self.inside: tuple[slice, ...] = ()
        if start:
            rank = len(start)
            extent = (1,) * (rank - len(shape)) + tuple(shape)[-rank:]
            self.extent = extent
            self.inside = tuple(slice(s, min(s + n, size)) for s, n, size in zip(start, extent, of.shape, strict=True))

    def numbers(self, pad: float) -> Array:
        if not self.start:
            return np.array(array(self.of))
        made = np.full(self.extent, pad)
        found = self.of.data[self.inside]
        made[tuple(slice(0, n) for n in found.shape)] = found
        return made

    def store(self, x: Array) -> None:
        fmt = self.of.dtype if isinstance(self.of, Buffer) else self.of.owner.dtype
        if not self.start:
            to = array(self.of)
            to[...] = rounded(plain(x).reshape(to.shape), fmt)
            return
        to = self.of.data[self.inside]
        to[...] = rounded(plain(x).reshape(self.extent)[tuple(slice(0, n) for n in to.shape)], fmt)


class Tile:
    """``T.tile``."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def __getattr__(self, name: str) -> Any:
        by_rows = {f"row_expand_{n}{end}": f for n, f in OF_TWO.items() for end in ("", "_experiment")}
        if name in by_rows:
            return lambda target, a, b, *_: self.put(target, by_rows[name](array(a), array(b).reshape(-1, 1)))
        if name in OF_TWO:
            return lambda target, a, b: self.put(target, OF_TWO[name](plain(array(a)), plain(array(b))))
        if name in FUNCTIONS:
            return lambda target, a, *_: self.put(target, FUNCTIONS[name](array(a)))
        raise AttributeError(f"T.tile.{name}")

    def put(self, target: Any, value: Any) -> None:
        if self.core.is_idle:
            return
        to, fmt = array(target), target.dtype if isinstance(target, Buffer) else target.owner.dtype
        value = rounded(value, fmt)
        to[...] = value.reshape(to.shape) if value.size == to.size else value

    def fill(self, target: Any, value: Any) -> None:
        self.put(target, array(value))

    word_fill = fill

    def clear(self, target: Any) -> None:
        self.put(target, 0.0)

    def axpy(self, target: Any, source: Any, by: Any) -> None:
        self.put(target, array(target) + array(source).reshape(array(target).shape) * array(by))

    def mul_add_dst(self, target: Any, a: Any, b: Any) -> None:
        self.put(target, array(target) + array(a) * array(b))

    def leaky_relu(self, target: Any, source: Any, slope: Any) -> None:
        x = array(source)
        self.put(target, np.where(x >= 0, x, x * array(slope)))

    def clamp(self, target: Any, source: Any, low: Any, high: Any, _count: Any = 0) -> None:
        self.put(target, np.minimum(np.maximum(array(source), low), high))

    def cast(self, target: Any, source: Any, mode: str = "CAST_NONE", count: Any = 0) -> None:
        x = array(source)
        fmt = target.dtype if isinstance(target, Buffer) else target.owner.dtype
        self.put(target, np.rint(x) if "int" in fmt and mode != "CAST_TRUNC" else x)  # NONE: RINT

    def broadcast(self, target: Any, source: Any, axis: Any = None) -> None:
        to, x = array(target), array(source)
        flat = to.reshape(to.shape[-2:])
        if x.size == to.size:
            made = x.reshape(flat.shape)
        elif x.ndim >= 2 and x.shape[-1] == 1 and axis != 0:
            made = np.broadcast_to(x.reshape(-1, 1), flat.shape)
        elif x.ndim >= 2 and x.shape[-2] == 1:
            made = np.broadcast_to(x.reshape(1, -1), flat.shape)
        else:
            is_row = axis == 0 or (axis is None and x.size == flat.shape[1])
            made = np.broadcast_to(x.reshape((1, -1) if is_row else (-1, 1)), flat.shape)
        self.put(target, made)

    def transpose(self, target: Any, source: Any) -> None:
        self.put(target, plain(array(source)).T)

    def arith_progression(self, target: Any, first: Any, step: Any, count: int) -> None:
        self.put(target, first + step * np.arange(count))

    def createvecindex(self, target: Any, first: Any) -> None:
        self.put(target, first + np.arange(array(target).size))

    def compare(self, target: Any, a: Any, b: Any, mode: str) -> None:
        if not self.core.is_idle:
            target.bits = COMPARISONS[mode](array(a), array(b))

    def select(self, target: Any, mask: Any, a: Any, b: Any, _mode: str) -> None:
        if not self.core.is_idle:
            self.put(target, np.where(mask.bits, array(a), array(b)))


class Group:
    """The cores of one program, and flags between them."""

    def __init__(self, program: int, names: Sequence[str]) -> None:
        self.program, self.names = program, names
        self.grid: tuple[int, ...] = ()
        self.flags: Mapping[tuple[str, str, int], threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))
        self.lock, self.error = threading.Lock(), list[BaseException]()
        self.barrier = threading.Barrier(len(names)) if "C" not in names and len(names) > 1 else None

    def together(self, is_shared: bool) -> Any:
        return self.turns() if is_shared and self.barrier is not None else self.lock

    @contextmanager
    def turns(self) -> Iterator[None]:
        assert self.barrier is not None
        self.barrier.wait(SECONDS)
        with self.lock:
            yield
        self.barrier.wait(SECONDS)

    def partners(self, name: str) -> list[str]:
        return [n for n in self.names if (n == "C") is not (name == "C")]

    def set(self, name: str, number: int) -> None:
        for other in self.partners(name):
            self.semaphore(other, name, number).release()

    def wait(self, name: str, number: int) -> None:
        for other in self.partners(name):
            if not self.semaphore(name, other, number).acquire(timeout=SECONDS):
                raise TimeoutError(f"{name} waits for flag {number} of {other}")

    def semaphore(self, to: str, of: str, number: int) -> threading.Semaphore:
        with self.lock:
            return self.flags[to, of, number]


def executed(kernel: PrimFunc, language: Language, given: Mapping[str, Any]) -> dict[str, Array]:
    """Return the tensors of a kernel behind all its programs; those that are not given are NaN before."""
    tensors = dict[str, Any]()
    for name, kind in kernel.function.__annotations__.items():
        if isinstance(kind, TensorType):
            data = given.get(name)
            shape = tuple(int(n) for n in kind.shape)
            made = np.full(shape, np.nan) if data is None else np.array(data, np.float64).reshape(shape)
            tensors[name] = Buffer(made, kind.fmt, is_global=True)
        elif name in given:
            tensors[name] = given[name]
    text = inspect.getsource(kernel.function)
    names = ["C", "V0", "V1"] if "T.Scope" in text else ["V0", "V1"]
    cores, program, count = threading.local(), 0, 1
    with language.walking(lambda name: cores.own.word(name)):  # noqa: PLW0108 - of the thread that asks
        while program < count:
            group = Group(program, names if "threads=" not in text else names[:1])

            def run(name: str, group: Group = group) -> None:
                cores.own = Core(name, int(name[1:] or 0), group)
                try:
                    with np.errstate(all="ignore"):
                        kernel.function(**tensors)
                except BaseException as error:  # noqa: BLE001 - shown by the caller
                    group.error.append(error)
                    if group.barrier is not None:
                        group.barrier.abort()

            threads = [threading.Thread(target=run, args=(name,)) for name in group.names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if group.error:
                raise group.error[0]
            count = int(np.prod(group.grid))
            program += 1
    return {name: x.data for name, x in tensors.items() if isinstance(x, Buffer)}
