"""Runs an expert program of TileLang-Ascend for one core group and lists the instructions that its cores issue, with
explicit flags.

The kernel runs as Python, once for the matrix core (C) and once for each vector core (V0, V1): loops and conditions of
integers run in Python, and each word of the language becomes an `Issued`.  `Decisions` answers a condition on a value
that is only known at run time; it tries both answers.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType, SimpleNamespace
from typing import Literal

from npusim.errors import SpecError
from npusim.kernels.tilelang.lengths import Growing, Growth, Move, Turn, move_of, plain
from npusim.kernels.tilelang.loop_state import of_loop
from npusim.kernels.tilelang.program import PLAIN, Language, PrimFunc, TensorType, place_in
from npusim.kernels.tilelang.tiles import Box, Buffer, OpenCondition, Scalar, width_of

CORES = ("C", "V0", "V1")
PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
Kind = Literal["access", "set", "wait", "barrier", "cross set", "cross wait"]
#: (from, to, id) of a flag in a core; ("cross", id) of a flag between cores.
Flag = tuple[object, ...]

#: Memory of a buffer by the word that allocates it.
_SPACES = MappingProxyType(
    {"alloc_L1": "L1", "alloc_ub": "UB", "alloc_L0A": "L0A", "alloc_L0B": "L0B", "alloc_L0C": "L0C"}
)
#: The pipe that copies from one memory to another (CANN, Ascend C API: data movement of AI Core, A2/A3).
_COPIES = MappingProxyType(
    {
        ("GM", "L1"): "MTE2",
        ("GM", "UB"): "MTE2",
        ("UB", "GM"): "MTE3",
        ("UB", "L1"): "MTE3",
        ("L1", "L0A"): "MTE1",
        ("L1", "L0B"): "MTE1",
        ("L0C", "GM"): "FIX",
        ("L0C", "L1"): "FIX",
        ("UB", "UB"): "V",
    }
)
#: Vector instructions: the target is first, all other buffers are read; `_READ_TARGET` reads the target too.
_OF_TWO = frozenset({"add", "sub", "mul", "div", "max", "min", "pow", "bitwise_and", "bitwise_or", "bitwise_xor"})
_OF_ONE = frozenset({"exp", "ln", "abs", "reciprocal", "sqrt", "rsqrt", "relu", "bitwise_not", "sin", "cos", "round"})
_WITH_NUMBERS = frozenset({"leaky_relu", "bitwise_lshift", "bitwise_rshift", "clamp", "clamp_max", "clamp_min", "cast"})
_BY_ROWS = frozenset(f"row_expand_{word}{end}" for word in ("mul", "sub", "div") for end in ("", "_experiment"))
_OF_LAYOUT = frozenset({"fill", "clear", "broadcast", "compare", "select", "gather", "transpose", "createvecindex"})
_READ_TARGET = frozenset({"axpy", "mul_add_dst"})
_VECTOR = _OF_TWO | _OF_ONE | _WITH_NUMBERS | _OF_LAYOUT | _READ_TARGET | _BY_ROWS | {"arith_progression"}
#: Words without an effect on memory or order.
_QUIET = frozenset(["annotate_layout", "printf", "print", "dump_tensor", "device_assert"])
#: Words for which the compiler adds flags.
_COMPILED = MappingProxyType(
    {
        "Pipelined": "a T.Pipelined loop",
        "Parallel": "a T.Parallel nest",
        "alloc_shared": "T.alloc_shared",
        "alloc_fragment": "T.alloc_fragment",
    }
)
#: Pass configurations under which the compiler adds flags or barriers.
_AUTOMATIC = ("TL_ASCEND_AUTO_SYNC", "TL_ASCEND_AUTO_CV_SYNC", "TL_ASCEND_AUTO_CV_COMBINE")


@dataclass(frozen=True, slots=True)
class Issued:
    """An issued instruction: ``pipe`` executes it; ``run`` counts how often ``line`` issued it (from 1).

    ``product``: rows, columns and depth of a product, or of the product for which the instruction loads. ``turn``: the
    number of the program's part and the iteration of the loop, if loops whose number of iterations grows divide the
    program into parts.
    """

    core: str
    pipe: str
    kind: Kind
    name: str
    line: int
    run: int
    reads: tuple[Box, ...] = ()
    writes: tuple[Box, ...] = ()
    flag: Flag = ()
    product: tuple[int, int, int] | None = None
    turn: tuple[int, int] = (0, 0)

    @property
    def stops_scalar_unit(self) -> bool:
        """Whether the core issues no further instruction before this one has ended."""
        return self.pipe == "S" and (self.kind in ("wait", "cross wait") or self.name == "scalar read")

    def __str__(self) -> str:
        return f"line {self.line} ({self.name}, {self.core} {self.pipe}, run {self.run})"


class Decisions:
    """Answers to the conditions that are only known at run time, along one path; equal conditions have one answer.

    ``more()`` moves to the next path, and returns whether there is one.
    """

    def __init__(self) -> None:
        self.path: list[tuple[str, int, int]] = []
        self._chosen = dict[str, int]()
        self._given = 0
        #: Keys of the conditions so far.
        self.asked = 0

    def begin(self) -> None:
        """Start to walk the current path."""
        self._chosen.clear()
        self._given = 0

    def choose(self, key: str, options: int) -> int:
        """Return the choice for a key, from 0."""
        if key not in self._chosen:
            self.asked += 1
            if self._given == len(self.path):
                self.path.append((key, 0, options))
            self._chosen[key] = self.path[self._given][1]
            self._given += 1
        return self._chosen[key]

    def more(self) -> bool:
        """Move to the next path."""
        while self.path and self.path[-1][1] + 1 == self.path[-1][2]:
            self.path.pop()
        if self.path:
            key, choice, options = self.path[-1]
            self.path[-1] = key, choice + 1, options
        return bool(self.path)

    def __str__(self) -> str:
        return ", ".join(f"{key} = {choice}" if n > 2 else f"{key} is {not choice}" for key, choice, n in self.path)


@dataclass(frozen=True, slots=True)
class GroupWalk:
    """The instructions of a core group in the order in which each core issues them, and the assumptions.

    ``cut``: for each loop in which only the first iterations were walked, the number of these iterations.
    """

    group: int
    groups: int
    cores: Mapping[str, tuple[Issued, ...]]
    notes: tuple[str, ...]
    cut: tuple[int, ...] = ()


#: Numbers of iterations that are tried if the number is known only at run time.
LOOP_COUNTS = (0, 1, 2, 3)


def walk_program(
    kernel: PrimFunc,
    language: Language,
    group: int,
    decisions: Decisions,
    scalars: Mapping[str, object],
    most: int | None = None,
    growth: Growth | None = None,
) -> GroupWalk:
    """Return the instructions of core group ``group`` along the path of ``decisions``.

    ``scalars``: values of the kernel's parameters that are not tensors; other parameters are unknown.  ``most``: number
    of iterations of an outermost loop that are walked.  ``growth``: the growth of a length, if a length grows.  Raises
    `SpecError` with the line of a call that cannot be read, or whose flags the compiler sets.
    """
    refuse_automatic(kernel)
    decisions.begin()
    cores, notes, groups, loose = dict[str, tuple[Issued, ...]](), dict[str, None](), 1, dict[str, int]()
    cut = set[int]()
    for core in CORES:
        one = _CoreWalk(kernel, core, group, decisions, most=most, growth=growth)
        one.run(language, scalars)
        cores[core], groups = tuple(one.issued), one.groups
        cut |= one.cut
        loose |= {core[0]: one.loose} if one.loose else {}
        notes |= dict.fromkeys(one.notes)
    if len(loose) == 2:
        raise SpecError(
            f"{kernel.path}:{loose['C']}: instructions of both cores are outside of T.Scope, where the compiler "
            "assigns them to a core"
        )
    working = {
        c: i for c, i in cores.items() if any(x.kind == "access" for x in i) or any("cross" in x.kind for x in i)
    }
    return GroupWalk(group, groups, working, tuple(notes), tuple(sorted(cut)))


def refuse_automatic(kernel: PrimFunc) -> None:
    """Raise `SpecError` if the compiler sets flags that the text does not show."""
    if on := [n for n in _AUTOMATIC if kernel.configurations.get(n)]:
        raise SpecError(
            f"{kernel.path}:{kernel.line}: {kernel.name} has pass_configs with {', '.join(on)}: the compiler adds "
            "the flags, which the source does not show; npusim checks only explicit flags and barriers (expert "
            "mode)"
        )


class _Unknown(Scalar):
    """A value that is only known at run time."""

    def __init__(self, text: str, walk: _CoreWalk) -> None:
        self._text, self._walk = text, walk

    def text(self) -> str:
        return self._text

    def compared(self, how: str, other: object) -> OpenCondition:
        left, right, negated = self._text, self._walk.text_of(other), False
        if how in ("<", ">="):
            left, right, how = right, left, {"<": ">", ">=": "<="}[how]
        if how in ("<=", "!="):
            how, negated = {"<=": ">", "!=": "=="}[how], True
        return OpenCondition(f"{left} {how} {right}", self._walk.decide, negated=negated)

    def combined(self, sign: str, *operands: object) -> Scalar:
        return _Unknown(f"({f' {sign} '.join(map(self._walk.text_of, operands))})", self._walk)

    def __index__(self) -> int:
        raise SpecError(
            f"{self._walk.here()}: {self._text} is known only at run time; T.serial accepts it, range does not"
        )


class _Part(Scalar):
    """A part of a buffer; one element of it is a scalar, which the scalar unit reads if arithmetic needs it.

    ``starts``: where each range of the box begins, which may grow.
    """

    def __init__(
        self, walk: _CoreWalk, buffer: Buffer, box: Box, starts: tuple[int | Growing, ...], *, is_element: bool
    ) -> None:
        self.walk, self.buffer, self.box, self.is_element = walk, buffer, box, is_element
        self.starts = starts
        self._read: _Unknown | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements by axis."""
        if None in self.box.moves and self.walk.growth is not None:
            self.walk.growth.refuse(f"the program reads the shape of {self.box}, which grows")
        return tuple(b - a for a, b in self.box.ranges)

    @property
    def dtype(self) -> str:
        """The format, under the name that programs read."""
        return self.buffer.fmt

    def scalar(self) -> _Unknown:
        """Return the element's value; the scalar unit reads it once."""
        if not self.is_element:
            raise SpecError(
                f"{self.walk.here()}: arithmetic on {self.box} is not supported: only a single element is a scalar"
            )
        if self._read is None:
            self._read = self.walk.read_scalar(self)
        return self._read

    def text(self) -> str:
        return self.scalar().text()

    def compared(self, how: str, other: object) -> OpenCondition:
        return self.scalar().compared(how, other)

    def combined(self, sign: str, *operands: object) -> Scalar:
        return self.scalar().combined(sign, *operands)


@dataclass
class _CoreWalk:
    """One core's run of a kernel."""

    kernel: PrimFunc
    core: str
    group: int
    decisions: Decisions
    groups: int = 1
    issued: list[Issued] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    loose: int = 0  # a line outside T.Scope that this core issues
    most: int | None = None  # number of iterations of an outermost loop that are walked
    cut: set[int] = field(default_factory=set)  # iterations of the loops that are not walked to their end
    _depth: int = 0
    growth: Growth | None = None  # the growth of the length
    turn: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self._runs, self._scope, self._buffers = Counter[tuple[int, str, str]](), "", list[Buffer]()
        self._reads = Counter[str]()

    # ------------------------------------------------------------ the kernel

    def run(self, language: Language, scalars: Mapping[str, object]) -> None:
        """Call the kernel."""
        function = self.kernel.function
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        if unknown := [n for n in scalars if n not in names]:
            raise SpecError(f"{self.kernel.path}: {self.kernel.name} has no parameter {', '.join(unknown)}")
        given = list[object]()
        for name in names:
            kind = function.__annotations__.get(name)
            if isinstance(kind, TensorType):
                given.append(self._buffer(name, self._sizes(kind.shape), kind.fmt, "GM"))
            else:
                given.append(scalars.get(name, _Unknown(name, self)))
        with language.walking(self.word):
            try:
                function(*given)
            except SpecError:
                raise
            except Exception as error:
                raise SpecError(f"{place_in(error, self.kernel.path)}: {type(error).__name__}: {error}") from error

    def _sizes(self, shape: object) -> tuple[int, ...]:
        sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        if any(isinstance(n, bool) or not isinstance(n, int | Growing) for n in sizes):
            raise SpecError(f"{self.here()}: the shape {sizes!r} has sizes that are not numbers; give them with -a")
        return sizes

    def _buffer(self, name: str, shape: tuple[int, ...], fmt: str, space: str) -> Buffer:
        width_of(fmt)
        numbers = tuple(map(plain if space == "GM" else operator.index, shape))
        buffer = Buffer(name, numbers, fmt, space, self.part, self.put)
        buffer.shape = shape if space == "GM" else numbers  # a program may compute with a shape that grows
        self._buffers.append(buffer)
        return buffer

    def here(self) -> str:
        """Return ``path:line`` of the program's line that runs."""
        return f"{self.kernel.path}:{self.line}"

    @property
    def line(self) -> int:
        """The line of the program that runs."""
        frame = self._frame
        return frame.f_lineno if frame is not None else self.kernel.line

    @property
    def _frame(self) -> FrameType:
        frame = sys._getframe(1)
        path = self.kernel.path
        while frame is not None and frame.f_code.co_filename != path:
            frame = frame.f_back  # type: ignore[assignment]
        return frame

    @property
    def is_muted(self) -> bool:
        """Whether the current statements belong to the other kind of core."""
        return self._scope not in ("", self.core[0])

    def decide(self, key: str) -> bool:
        """Return the answer to a condition; in statements of the other core the answer has no effect."""
        return not self.is_muted and self.decisions.choose(key, 2) == 0

    def text_of(self, x: object) -> str:
        """Return an operand as text."""
        return x.text() if isinstance(x, Scalar) else repr(plain(x) if isinstance(x, Growing) else x)

    def read_scalar(self, part: _Part) -> _Unknown:
        """Return the value of an element that the scalar unit reads."""
        box = part.box
        version = f"@{part.buffer.writes}" if part.buffer.writes else ""
        where = f"{self.core}:" if box.space != "GM" else ""
        index = ", ".join(str(a) for a, _ in box.ranges) if box.is_exact else "?"
        if not box.is_exact:
            self._reads[part.buffer.name] += 1
            version += f"#{self._reads[part.buffer.name]}"
        self.issue("S", "access", "scalar read", reads=(box,))
        return _Unknown(f"{where}{part.buffer.name}[{index}]{version}", self)

    # ------------------------------------------------------------ parts of buffers

    def part(self, buffer: Buffer, index: object) -> _Part:
        """Return the part of a buffer under an index: integers, slices, and values that are only known at run time."""
        entries = index if isinstance(index, tuple) else (index,)
        if len(entries) > len(buffer.shape):
            raise SpecError(
                f"{self.here()}: {len(entries)} indices for {buffer.name}, which has {len(buffer.shape)} axes"
            )
        ranges, is_element, is_exact = list[tuple[int, int]](), len(entries) == len(buffer.shape), True
        starts, moves = list[int | Growing](), list[Move]()
        for n, entry in zip(buffer.shape, (*entries, *[slice(None)] * (len(buffer.shape) - len(entries))), strict=True):
            pair: tuple[int | Growing, int | Growing] = (0, n)
            if isinstance(entry, slice):
                is_element = False
                if entry.step not in (None, 1):
                    raise SpecError(f"{self.here()}: a slice of {buffer.name} has a step, which is not supported")
                low = entry.start if isinstance(entry.start, Growing) else entry.start or 0
                high = n if entry.stop is None else entry.stop
                is_known = not isinstance(low, Scalar) and not isinstance(high, Scalar)
                pair = (_whole(low), _whole(high)) if is_known else pair
                is_exact = is_exact and is_known
            elif isinstance(entry, Scalar):
                entry.text()  # the scalar unit reads it
                is_exact = False
            else:
                pair = (_whole(entry), _whole(entry) + 1)
            ranges.append((plain(pair[0]), plain(pair[1])))
            starts.append(pair[0])
            moves.append(move_of(*pair))
        box = self._box(buffer, tuple(ranges), tuple(moves), is_exact=is_exact)
        return _Part(self, buffer, box, tuple(starts), is_element=is_element)

    def put(self, buffer: Buffer, index: object, value: object) -> None:
        """A scalar store: the scalar unit writes an element."""
        if isinstance(value, Scalar):
            value.text()
        target = self.part(buffer, index)
        self.issue("S", "access", "scalar write", writes=(target.box,))
        buffer.writes += 1

    def _box(
        self,
        buffer: Buffer,
        ranges: tuple[tuple[int, int], ...],
        moves: tuple[Move, ...] = (),
        *,
        is_exact: bool = True,
    ) -> Box:
        core = "" if buffer.space == "GM" else self.core
        own = moves if any(x != 0 for x in moves) else ()
        return Box(buffer.name, buffer.space, core, ranges, buffer.strides, buffer.fmt, buffer.address, is_exact, own)

    def box(self, x: object) -> Box:
        """Return an operand as a part of memory."""
        if isinstance(x, Buffer):
            return self._box(x, tuple((0, plain(n)) for n in x.shape), tuple(move_of(0, n) for n in x.shape))
        if isinstance(x, _Part):
            return x.box
        raise SpecError(f"{self.here()}: the operand {x!r:.60} must be a buffer or a part of one")

    def _block(self, x: object, other: object) -> Box:
        """Return an operand of a copy; one element represents the block that begins there."""
        box = self.box(x)
        if not (isinstance(x, _Part) and x.is_element):
            return box
        extents = [b - a for a, b in self.box(other).ranges]
        if isinstance(other, _Part) and other.is_element:
            return box
        extents = [1] * (len(box.ranges) - len(extents)) + extents[-len(box.ranges) :]
        pairs = [(a, min(a + e, n)) for a, e, n in zip(x.starts, extents, x.buffer.shape, strict=True)]
        ranges, moves = [(plain(a), plain(b)) for a, b in pairs], [move_of(*pair) for pair in pairs]
        before = box.moves or (0,) * len(ranges)
        known = [
            (r, move) if b - a == 1 else ((a, b), old)
            for r, move, (a, b), old in zip(ranges, moves, box.ranges, before, strict=True)
        ]
        return self._box(x.buffer, *map(tuple, zip(*known, strict=True)), is_exact=box.is_exact)

    # ------------------------------------------------------------ words

    def issue(
        self,
        pipe: str,
        kind: Kind,
        name: str,
        *,
        reads: tuple[Box, ...] = (),
        writes: tuple[Box, ...] = (),
        flag: Flag = (),
        product: tuple[int, int, int] | None = None,
    ) -> None:
        """Add an instruction, if this core executes it."""
        is_cube = pipe in ("M", "MTE1", "FIX") or any(b.space in ("L1", "L0A", "L0B", "L0C") for b in (*reads, *writes))
        is_vector = pipe in ("V", "MTE3") or any(b.space == "UB" for b in (*reads, *writes))
        if self.is_muted:
            return
        if not self._scope and kind == "access" and (is_cube or is_vector):
            if is_cube is not (self.core == "C"):
                return
            self.loose = self.line
        line = self.line
        key = line, pipe, name
        self._runs[key] += 1
        run = self._runs[key]
        self.issued.append(Issued(self.core, pipe, kind, name, line, run, reads, writes, flag, product, self.turn))

    def word(self, name: str) -> object:
        """Return a word of the language."""
        if name in _COMPILED:
            raise SpecError(
                f"{self.here()}: {_COMPILED[name]}: the compiler adds the flags, which the source does not show; "
                "npusim checks only explicit flags and barriers (expert mode)"
            )
        if name in _SPACES:
            return lambda shape, dtype="float32", *_, **__: self._buffer(
                self._name_of_target(), self._sizes(shape), str(dtype), _SPACES[name]
            )
        if name in _QUIET:
            return lambda *_, **__: None
        if name.startswith("reduce_"):
            return lambda source, target, *rest, **_: self._vector(name, target, (source, *rest))
        if name == "tile":
            return _Tile(self)
        own = getattr(self, f"word_{name}", None)
        if own is None and name not in PLAIN:
            raise SpecError(f"{self.here()}: npusim has no rule for T.{name}; its accesses are unknown")
        return own or PLAIN[name]

    def _name_of_target(self) -> str:
        """Return a name for a buffer: the name of the variable in the program's line."""
        from linecache import getline

        target, sign, _ = getline(self.kernel.path, self.line).partition("=")
        base = target.strip() if sign and target.strip().isidentifier() else f"buffer of line {self.line}"
        same = sum(b.name.partition(" (")[0] == base for b in self._buffers)
        return f"{base} ({same + 1})" if same else base

    @contextmanager
    def word_Kernel(self, *grid: int, **_: object) -> Iterator[object]:  # the program's word
        """The grid: the numbers of this core group, and of the vector core."""
        self.groups, sizes = 1, self._sizes(grid)
        for n in sizes:
            self.groups *= plain(n)
            if isinstance(n, Growing):
                # from some length on, the group is in the first row of this axis
                n.growth.has_grid = n > self.group or True
        if not 0 <= self.group < self.groups:
            raise SpecError(f"{self.here()}: core group {self.group}; allowed: 0 to {self.groups - 1}")
        rest, numbers = self.group, list[int]()
        for n in reversed(sizes):
            rest, last = divmod(rest, plain(n))
            numbers.insert(0, last)
        yield (*numbers, int(self.core[1:] or 0))

    @contextmanager
    def word_Scope(self, scope: str) -> Iterator[None]:
        """Statements of one kind of core."""
        if scope not in ("C", "V"):
            raise SpecError(f"{self.here()}: T.Scope({scope!r}); allowed: 'C', 'V'")
        before, self._scope = self._scope, scope
        yield
        self._scope = before

    def word_serial(self, *bounds: object, **_: object) -> Iterator[int]:
        """A loop, as it runs; if its number of iterations is known only at run time, several numbers are tried."""
        low, high, *step = (0, bounds[0]) if len(bounds) == 1 else bounds
        if isinstance(low, Growing) or isinstance(high, Growing):
            yield from self._growing_loop(low, high, step)
            return
        if isinstance(low, Scalar) or step:
            raise SpecError(f"{self.here()}: T.serial has a step, or a start that is known only at run time")
        if isinstance(high, Scalar):
            key = f"iterations of {self.text_of(high)}"
            count = 1 if self.is_muted else LOOP_COUNTS[self.decisions.choose(key, len(LOOP_COUNTS))]
            self.notes.append(
                f"line {self.line}: a loop of {self.text_of(high)} iterations is checked for {LOOP_COUNTS}"
            )
            high = operator.index(low) + count  # type: ignore[arg-type]
        numbers = range(operator.index(low), operator.index(high))  # type: ignore[arg-type]
        if self.most is not None and not self._depth and len(numbers) > self.most and not self.is_muted:
            self.cut.add(len(numbers))
            numbers = numbers[: self.most]
        self._depth += 1
        yield from numbers[:1] if self.is_muted else numbers
        self._depth -= 1

    word_unroll = word_serial

    def _growing_loop(self, low: object, high: object, step: Sequence[object]) -> Iterator[int]:
        """Yield the iterations of a loop whose number of iterations grows."""
        if self.is_muted:
            yield from range(plain(low), plain(high))[:1]
            return
        growth = next(x.growth for x in (high, low) if isinstance(x, Growing))
        is_regular = isinstance(high, Growing) and not isinstance(low, Growing | Scalar) and not step
        if not is_regular or self.turn[0] % 2:
            growth.refuse("a loop that starts at an integer that grows, or is inside another loop that grows")
            yield from range(plain(low), plain(high))
            return
        assert isinstance(high, Growing)
        if high.slopes != (0, 1):
            growth.refuse_loop(high.slopes[1])
        turn, part, asked = Turn(operator.index(low), high.value), self.turn[0] + 1, -1  # type: ignore[arg-type]
        growth.ran(part, turn.iteration, turn.end)
        frame = self._frame
        names = {**frame.f_globals, **frame.f_locals}
        growth.reasons |= dict.fromkeys(of_loop(self.kernel.path, frame.f_lineno, names))
        is_ended = False
        try:
            for t in range(turn.iteration, turn.end):
                turn.iteration, self.turn = t, (part, t)
                yield Growing(growth, t, 1, 0, turn)  # type: ignore[misc]  # it computes as an integer does
                if asked not in (-1, self.decisions.asked):
                    growth.refuse("a later iteration needs a value that is known only at run time")
                asked = self.decisions.asked
            is_ended = True
        finally:
            turn.is_open, self.turn = False, (part + 1, 0)
            if not is_ended:
                growth.refuse("the loop is left before its end")

    def word_use_swizzle(self, *numbers: object, **_: object) -> object:
        """Choose another order of the blocks: each block's instructions are the same."""
        self.notes.append(
            "T.use_swizzle: blocks are checked in the grid's order; flags order only the cores of one block"
        )
        return numbers[0] if numbers else None

    def word_annotate_address(self, addresses: Mapping[Buffer, int]) -> None:
        """Bytes at which buffers begin."""
        for buffer, address in addresses.items():
            buffer.address = operator.index(address)

    def word_copy(self, source: object, target: object, *_: object, **__: object) -> None:
        """A copy: its pipe follows from the two memories."""
        a, b = self._block(source, target), self._block(target, source)
        pipe = _COPIES.get((a.space, b.space))
        if pipe is None:
            raise SpecError(f"{self.here()}: npusim has no rule for a copy from {a.space} to {b.space}")
        self.issue(pipe, "access", "copy", reads=(a,), writes=(b,))
        self._written(target)

    def word_gemm_v0(self, a: object, b: object, c: object, *_: object, **__: object) -> None:
        """A product of tiles in L1: MTE1 loads them, then the matrix unit writes; the instruction orders the two
        itself.
        """
        flag, sizes, own = ("product", len(self.issued)), self.sizes_of_product(a, c), (self.box(c),)
        self.issue("MTE1", "access", "product loads", reads=(self.box(a), self.box(b)), flag=flag, product=sizes)
        self.issue("M", "access", "product", reads=own, writes=own, flag=flag, product=sizes)

    word_gemm_v1 = word_gemm_v0

    def word_mma(self, a: object, b: object, c: object, *_: object, **__: object) -> None:
        """A product of tiles in L0A and L0B."""
        reads, sizes = (self.box(a), self.box(b), self.box(c)), self.sizes_of_product(a, c)
        self.issue("M", "access", "mma", reads=reads, writes=(self.box(c),), product=sizes)

    def sizes_of_product(self, a: object, c: object) -> tuple[int, int, int]:
        """Return the rows, columns and depth of a product into c."""
        left, target = self.box(a), self.box(c)
        columns = target.ranges[-1][1] - target.ranges[-1][0]
        rows = max(1, target.size // target.width // max(1, columns))
        return rows, columns, left.size // left.width // rows

    def _vector(self, name: str, target: object, sources: tuple[object, ...]) -> None:
        reads = list[Box]()
        for x in sources:
            if isinstance(x, _Part) and x.is_element:
                x.text()  # an element is an operand that the scalar unit reads
            elif isinstance(x, Buffer | _Part):
                reads.append(self.box(x))
            elif isinstance(x, Scalar):
                x.text()
        own = (self.box(target),)
        self.issue("V", "access", name, reads=(*reads, *(own if name in _READ_TARGET else ())), writes=own)
        self._written(target)

    def _written(self, target: object) -> None:
        if not self.is_muted:
            buffer = target if isinstance(target, Buffer) else target.buffer if isinstance(target, _Part) else None
            if buffer is not None:
                buffer.writes += 1

    # ------------------------------------------------------------ flags and barriers

    def _pipe(self, pipe: object) -> str:
        text = str(pipe).upper()
        if text not in PIPES:
            raise SpecError(f"{self.here()}: pipe {pipe!r}; allowed: {', '.join(PIPES)}")
        return text

    def _id(self, number: object) -> int:
        if isinstance(number, Scalar):
            raise SpecError(f"{self.here()}: the flag's id {self.text_of(number)} is known only at run time")
        return operator.index(number)  # type: ignore[arg-type]

    def word_set_flag(self, source: object, target: object, number: object) -> None:
        """A flag that a pipe sets for another pipe of its core."""
        a, b, i = self._pipe(source), self._pipe(target), self._id(number)
        self.issue(a, "set", f"set_flag {a} {b} {i}", flag=(a, b, i))

    def word_wait_flag(self, source: object, target: object, number: object) -> None:
        """A pipe waits for a flag and clears it."""
        a, b, i = self._pipe(source), self._pipe(target), self._id(number)
        self.issue(b, "wait", f"wait_flag {a} {b} {i}", flag=(a, b, i))

    def word_set_cross_flag(self, pipe: object, number: object, mode: int = 2) -> None:
        """A flag for the cores of the other kind."""
        if mode != 2:
            raise SpecError(f"{self.here()}: set_cross_flag has mode {mode}; allowed: mode 2 (C and both V)")
        i = self._id(number)
        self.issue(self._pipe(pipe), "cross set", f"set_cross_flag {i}", flag=("cross", i))

    def word_wait_cross_flag(self, number: object, pipe: str = "") -> None:
        """A wait for the cores of the other kind: of the scalar unit, or of one pipe."""
        i = self._id(number)
        self.issue(self._pipe(pipe) if pipe else "S", "cross wait", f"wait_cross_flag {i}", flag=("cross", i))

    def word_barrier_all(self) -> None:
        """A barrier of all pipes of a core."""
        self.issue("ALL", "barrier", "barrier_all")

    def word_pipe_barrier(self, pipe: object) -> None:
        """A barrier of one pipe."""
        name = str(pipe).upper()
        self.issue("ALL" if name == "ALL" else self._pipe(pipe), "barrier", f"pipe_barrier {name}")


def _whole(x: object) -> int | Growing:
    """Return an index as an integer, which may grow."""
    return x if isinstance(x, Growing) else operator.index(x)  # type: ignore[arg-type]


class _Tile(SimpleNamespace):
    """``T.tile``: vector instructions of tiles."""

    def __init__(self, walk: _CoreWalk) -> None:
        super().__init__()
        self._walk = walk

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in _VECTOR:
            raise SpecError(f"{self._walk.here()}: npusim has no rule for T.tile.{name}; its accesses are unknown")
        return lambda target, *sources, **_: self._walk._vector(name, target, sources)
