"""Kernels with blocks of more than two axes, or with blocks that are reshaped, joined, split or transposed, as TTIR on
blocks of one or two axes.

A block that a store or a product reads is computed lane by lane.  Every block on which it depends, back to the loads,
then has exactly the lanes that are read, in the order in which they are read.  Integers, masks and addresses that are
known at launch are selected by lane (`LANES`), so that no arithmetic changes.  A load whose lanes are read in several
orders is repeated for each order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

import numpy as np

from npusim.kernels.triton.blocks_as_rows import carried_by
from npusim.kernels.triton.loads_and_stores import CONVERSIONS
from npusim.kernels.triton.region_rewriter import OtherBlocksError
from npusim.kernels.triton.ttir_text import FORMATS, TYPES, Function, Op, every_of, makers, shape_of
from npusim.kernels.triton.values import Integers

#: Operations that TTIR does not have: `LANES` selects lanes of integers, masks or addresses that are known at launch,
#: from one block or several; `LANE_MASK` is a mask that is known when the kernel is read.
LANES, LANE_MASK = "npusim.lanes", "npusim.lane_mask"
#: Operations that move lanes of a block.
_MOVES = ("tt.reshape", "tt.join", "tt.split", "tt.trans", "tt.expand_dims", "tt.broadcast", "ttg.convert_layout")
#: Those of `_MOVES` that blocks of one or two axes must not have.
_ODD = ("tt.reshape", "tt.join", "tt.split")
#: Operations on single elements.
_ELEMENTWISE = ("arith.", "math.", "tt.fp_to_fp", "tt.extern_elementwise", "tt.precise", "tt.clampf", "tt.bitcast")
_FLOATS_FROM = ("arith.cmpf", "arith.fptosi", "arith.fptoui")
_STORE = "tt.store"
#: Operations that may change memory, or have other rules for elements; a kernel that has one is not read here.
_OTHERS = ("tt.atomic", "tt.descriptor", "tt.make_tensor", "tt.call", "tt.elementwise_inline", "tt.histogram")
#: Operations of two floats whose order has no effect.
_OF_PAIRS = ("arith.addf", "arith.mulf", "arith.maxnumf", "arith.minnumf", "arith.maximumf", "arith.minimumf")
#: Operations that join the elements of a block along an axis.
_JOINED = ("tt.reduce", "tt.scan")
_TWO, _MOST = 2, 1 << 20
_SHAPE = re.compile(r"tensor<(?:\d+x)+")
_PRODUCT = "tt.dot"


@dataclass(eq=False)
class LanesOp(Op):
    """An operation with the lanes of its result: positions in its operands' blocks, counted through all blocks."""

    lanes: Integers = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def is_alike(self) -> bool:
        """Whether all lanes along one of two axes are the same."""
        is_block = self.lanes.ndim == _TWO and min(self.lanes.shape) > 1
        return is_block and any(np.all(self.lanes == np.take(self.lanes, [0], axis)) for axis in range(_TWO))


@dataclass
class _Wanted:
    """The lanes of a block that an operation reads, in the shape in which it reads them, and the name of the result."""

    lanes: Integers
    name: str


def with_lanes_pulled(function: Function) -> Iterator[Function]:
    """Yield a kernel rewritten on blocks of one or two axes; nothing if all its blocks have this form already, or if
    lanes of a value cannot be computed one by one.

    A stored block has its own axes, or one axis, or as columns the lanes along which a block is reduced.
    """
    every = every_of(function.operations)
    if any(o.name.startswith(_OTHERS) for o in every):
        return
    turned, scales = [o for o in every if o.name == "tt.trans"], _scales_of_factors(function)
    if not any(map(_is_odd, every)) and all(is_only_factor(o.results[0], every) for o in turned):
        return
    axes = sorted({o.number("axis") for o in every if o.name in _JOINED and len(_operand_shape(o)) > _TWO})
    for columns, whole in product((*(axes or ()), None), (scales, frozenset[str]()) if scales else (scales,)):
        try:
            yield function._replace(operations=_Lanes(function, columns, whole).result())
        except OtherBlocksError:
            continue


def _scales_of_factors(function: Function) -> frozenset[str]:
    """Return the blocks of floats that repeat a vector along an axis, and from which a loop computes factors of its
    products.

    A loop's tiles have no axis of one index, so that such a block is loaded whole.
    """
    result = set[str]()
    for loop in (o for o in function.operations if o.name == "scf.for"):
        made = makers(loop.body)
        waiting = [n for o in loop.body if o.name == _PRODUCT for n in o.operands[:2]]
        while waiting:
            if (op := made.get(waiting.pop())) is None or op.name == _PRODUCT:
                continue
            is_spread = op.name == "tt.broadcast" and shape_of(op.type)[1] in FORMATS and "ptr" not in op.type
            result |= set(op.results) if is_spread and len(shape_of(op.type)[0]) == _TWO else set()
            waiting += op.operands if op.name != "tt.load" else ()
    return frozenset(result)


def is_of_lanes(function: Function) -> bool:
    """Return whether lanes of a kernel were selected here, so that its blocks have no other form."""
    return any(isinstance(o, LanesOp) for o in every_of(function.operations))


def _is_odd(op: Op) -> bool:
    """Return whether an operation has blocks of three axes, or moves lanes in a way that blocks of two axes do not
    have.
    """
    shapes = [shape_of(t)[0] for t in TYPES.findall(op.text.rpartition(" : ")[2]) if t.startswith("tensor")]
    if op.results and any(len(s) > _TWO for s in (*shapes, shape_of(op.type)[0])):
        return True
    return op.name in _ODD and not _is_of_ones(op)


def is_only_factor(name: str, every: Sequence[Op]) -> bool:
    """Return whether only products read a value, directly or after a conversion."""
    readers = [o for o in every if name in o.operands]
    return all(o.name == _PRODUCT or (o.name in CONVERSIONS and is_only_factor(o.results[0], every)) for o in readers)


def _is_of_ones(op: Op) -> bool:
    """Return whether a reshape only adds or removes axes of one index."""
    before, after = _operand_shape(op), shape_of(op.type)[0]
    return op.name == "tt.reshape" and [n for n in before if n > 1] == [n for n in after if n > 1]


def _operand_shape(op: Op) -> tuple[int, ...]:
    """Return the shape of the first operand of an operation whose result has another shape."""
    types = TYPES.findall(op.text.rpartition(" : ")[2])
    return shape_of(types[0])[0] if types else ()


class _Lanes:
    """The operations of a kernel on lanes; ``columns``: the axis that becomes the columns of stored blocks of three
    axes; ``whole``: blocks with equal elements along an axis that are loaded whole.
    """

    def __init__(self, function: Function, columns: int | None, whole: frozenset[str]) -> None:
        self.function, self.columns, self.whole = function, columns, whole
        self.every = list(_in_order(function.operations))
        self.made = makers(self.every)
        self.carried = carried_by(self.every)
        self.wanted = dict[str, dict[tuple[tuple[int, ...], bytes], _Wanted]]()
        self.native = set[str]()
        self._known, self._odd = dict[str, bool](), dict[str, bool]()
        self._before = list[Op]()
        self._counts = dict[str, int]()

    def result(self) -> list[Op]:
        """Return the operations; raise `OtherBlocksError` if lanes of a value cannot be computed one by one."""
        for op in reversed(self.every):
            self._rewritten(op)
        return self._region(self.function.operations)

    def _region(self, operations: Sequence[Op]) -> list[Op]:
        result = list[Op]()
        for op in operations:
            if op.body or op.otherwise:
                body, otherwise = self._region(op.body), self._region(op.otherwise)
                inner = op.operands[:1] + op.operands[4::2] if op.name == "scf.for" else []
                body = [*self._of_carried(inner, op), *body]
                op = replace(op, body=body, otherwise=otherwise) if op.name not in _JOINED else op  # noqa: PLW2901
            result += self._rewritten(op)
            if op.name in ("scf.for", "scf.if", "scf.while"):
                result += self._of_carried(op.results, op)
        return result

    def _of_carried(self, names: Sequence[str], at: Op) -> list[Op]:
        return [self._chosen([n], w, self._type(n), at) for n in names for w in self.wanted.get(n, {}).values()]

    # ---------------------------------------------------------------- what is known of a value

    def _type(self, name: str) -> str:
        op = self.made.get(name)
        if name in self.carried:
            return f"{self.carried[name].type}"
        if op is None:
            return self.function.parameters.get(name, "i32")
        types: list[str] = TYPES.findall(op.type) or [op.type]
        if op.name in ("arith.cmpi", "arith.cmpf"):
            return re.sub(r"x(\w+|!tt\.ptr<\w+>)>$", "xi1>", types[-1]) if types[-1].startswith("tensor") else "i1"
        if op.name == "tt.load":
            return re.sub(r"!tt\.ptr<(\w+)>", r"\1", types[-1])
        if op.name == "tt.addptr":
            return types[0]
        return types[op.results.index(name)] if len(types) == len(op.results) else types[-1]

    def _shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self._type(name))[0]

    def _is_known(self, name: str) -> bool:
        """Return whether a value is known at launch: integers that are computed from no floats."""
        if name not in self._known:
            self._known[name] = True  # assumed of a value that a loop carries, unless its start or its end is unknown
            self._known[name] = self._is_known_anew(name)
        return self._known[name]

    def _is_known_anew(self, name: str) -> bool:
        if "ptr" not in self._type(name) and shape_of(self._type(name))[1] in FORMATS:
            return False
        if name in self.carried:
            return all(map(self._is_known, self._carried_from(name)))
        op = self.made.get(name)
        if op is None or op.name == "tt.load":
            return op is None or all(map(self._is_known, op.operands[:2]))
        if op.name in _FLOATS_FROM or op.name in ("scf.if", "tt.atomic_rmw", "tt.scan"):
            return False
        return all(map(self._is_known, op.operands))

    def _carried_from(self, name: str) -> list[str]:
        for op in self.every:
            if op.name == "scf.for":
                names = zip(op.operands[4::2], op.operands[5::2], op.body[-1].operands, op.results, strict=False)
                for inner, start, end, result in names:
                    if name in (inner, result):
                        return [start, end]
        return []

    def _is_odd_at(self, name: str) -> bool:
        """Return whether a value is computed from moved lanes, or from a block of three axes."""
        if name not in self._odd:
            self._odd[name] = False
            op = self.made.get(name)
            if op is not None and op.name != _PRODUCT:
                turns = op.name == "tt.trans" and not is_only_factor(name, self.every)
                self._odd[name] = _is_odd(op) or turns or name in self.whole or any(map(self._is_odd_at, op.operands))
        return self._odd[name]

    # ---------------------------------------------------------------- lanes that are read

    def _read(self, name: str, lanes: Integers) -> str:
        """Return the name of lanes of a block; note that they are read."""
        shape = self._shape(name)
        if lanes.size > _MOST:
            raise OtherBlocksError
        if lanes.shape == shape and len(shape) <= _TWO and np.array_equal(lanes.reshape(-1), np.arange(lanes.size)):
            self.native.add(name)
            return name
        if not self.whole and not self._is_known(name) and lanes.ndim == _TWO and min(lanes.shape) > 1:
            for axis in (1, 0):
                one = np.take(lanes, [0], axis)
                if np.array_equal(np.broadcast_to(one, lanes.shape), lanes):
                    return self._spread(name, one.reshape(-1), lanes.shape, axis)
        op = self.made.get(name)
        is_of_region = op is not None and bool(op.body) and op.name not in _JOINED
        if (is_of_region or name in self.carried) and not self._is_known(name):
            raise OtherBlocksError
        key = lanes.shape, lanes.astype(np.int64).tobytes()
        of = self.wanted.setdefault(name, {})
        if key not in of:
            of[key] = _Wanted(lanes, f"{name}@lanes{len(of) + 1}")
        return of[key].name

    def _spread(self, name: str, lanes: Integers, shape: tuple[int, ...], axis: int) -> str:
        """Return a block in which the lanes of a vector are equal along an axis."""
        vector, like = self._read(name, lanes), self.made[name]
        self._counts[name] = number = self._counts.get(name, 0) + 1
        thin = (shape[0], 1) if axis == 1 else (1, shape[1])
        types = [_typed(self._type(name), s) for s in (lanes.shape, thin, shape)]
        text = f"tt.expand_dims {{axis = {axis} : i32}} : {types[0]} -> {types[1]}"
        names = [f"{name}@{how}{number}" for how in ("thin", "wide")]
        one = Op("tt.expand_dims", names[:1], [vector], text, types[1], like.line, place=like.place)
        text = f"tt.broadcast : {types[1]} -> {types[2]}"
        self._before += [one, Op("tt.broadcast", names[1:], names[:1], text, types[2], like.line, place=like.place)]
        return names[1]

    def _rewritten(self, op: Op) -> list[Op]:
        """Return the operations in place of one; note which lanes of its operands they read."""
        if op.name == _STORE:
            return self._store(op)
        if op.name == _PRODUCT or not op.results or (op.body and op.name not in _JOINED):
            for n in op.operands:
                self._as_it_is(n)
            return [op]
        result = list[Op]()
        if any(r in self.native for r in op.results):
            is_plain = not any(map(self._is_odd_at, op.results)) or op.name == "arith.constant"
            is_plain |= all(map(self._is_known, op.results)) and op.name not in (*_ODD, "tt.trans")
            for r in () if is_plain else op.results:
                if r in self.native:
                    result += self._lanes_of(op, _Wanted(_all(self._shape(r)), r), r)
            if is_plain:
                for n in op.operands:
                    self._as_it_is(n)
                result.append(op)
        for r in op.results:
            for each in list(self.wanted.get(r, {}).values()):
                result += self._lanes_of(op, each, r)
        return result

    def _as_it_is(self, name: str) -> None:
        shape = self._shape(name)
        if len(shape) > _TWO and not self._is_known(name):
            raise OtherBlocksError
        self.native.add(name)

    def _store(self, op: Op) -> list[Op]:
        pointer, value, *mask = op.operands
        shape = self._shape(value)
        if not shape or (len(shape) <= _TWO and not any(map(self._is_odd_at, op.operands))):
            for n in op.operands:
                self._as_it_is(n)
            return [op]
        lanes = _all(shape)
        if len(shape) > _TWO or (self.columns is None and _reduces(value, self.made)):
            lanes = lanes.reshape(-1)
            if self.columns is not None and self.columns < len(shape):
                lanes = np.moveaxis(_all(shape), self.columns, -1).reshape(-1, shape[self.columns])
        self._before = []
        operands = [self._read(n, lanes) for n in (pointer, value, *mask)]
        return [*self._before, replace(op, operands=operands, text=_typed(op.text, lanes.shape))]

    def _lanes_of(self, op: Op, of: _Wanted, result: str) -> list[Op]:
        """Return the operations that compute lanes of a result."""
        self._before = []
        if self._is_known(result):
            return [self._of_known(op, of, result)]
        if op.name in _MOVES:
            one = self._moved(op, of, result)
        elif op.name == "tt.reduce":
            one = self._reduced(op, of)
        elif op.name == "tt.scan":
            one = self._scanned(op, of)
        elif op.name in ("arith.constant", "tt.splat"):
            operands = [self._read(n, _all(())) for n in op.operands]
            type_ = _typed(op.type, of.lanes.shape)
            text = _typed(op.text, of.lanes.shape)
            one = replace(op, results=[of.name], operands=operands, text=text, type=type_)
        elif op.name == "tt.load" or op.name.startswith(_ELEMENTWISE):
            operands = [self._read(n, of.lanes) if self._shape(n) else self._read(n, _all(())) for n in op.operands]
            text, type_ = (_typed(t, of.lanes.shape) for t in (op.text, op.type))
            one = replace(op, results=[of.name], operands=operands, text=text, type=type_)
        else:
            raise OtherBlocksError
        return [*self._before, one]

    def _of_known(self, op: Op, of: _Wanted, result: str) -> Op:
        """Return the operation that selects lanes of integers; if ``op`` moves lanes, it selects them from the operands
        of ``op``.
        """
        if op.name in (*_ODD, "tt.trans"):
            sizes = [prod(self._shape(n)) for n in op.operands]
            lanes = [self._sources(op, of.lanes, result, i) for i in range(len(sizes))]
            starts = np.cumsum([0, *sizes[:-1]])
            chosen = lanes[0] if op.name != "tt.join" else np.where(of.lanes % _TWO, lanes[1] + starts[1], lanes[0])
            self.native |= {*op.operands}
            return self._chosen(op.operands, _Wanted(chosen, of.name), self._type(result), op)
        self.native.add(result)
        for n in op.operands:
            self._as_it_is(n)
        return self._chosen([result], of, self._type(result), op)

    @staticmethod
    def _chosen(names: list[str], of: _Wanted, type_: str, at: Op) -> Op:
        made = _typed(type_, of.lanes.shape)
        return LanesOp(LANES, [of.name], names, f"{LANES} : {made}", made, at.line, place=at.place, lanes=of.lanes)

    def _sources(self, op: Op, lanes: Integers, result: str, which: int = 0) -> Integers:
        """Return the lanes of an operand from which the lanes of the result come."""
        shape, before = self._shape(result), self._shape(op.operands[which])
        if op.name == "tt.reshape" and "allow_reorder" in op.text:
            raise OtherBlocksError
        if op.name == "tt.broadcast":
            at = np.unravel_index(lanes, shape)
            return np.asarray(
                np.ravel_multi_index([np.minimum(a, n - 1) for a, n in zip(at, before, strict=True)], before)
            )
        if op.name == "tt.trans":
            return _all(before).transpose(op.numbers("order")).reshape(-1)[lanes]
        if op.name == "tt.join":
            return np.asarray(lanes // _TWO)
        if op.name == "tt.split":
            return np.asarray(lanes * _TWO + op.results.index(result))
        return lanes

    def _moved(self, op: Op, of: _Wanted, result: str) -> Op:
        """Return a value whose lanes are unchanged lanes of other values."""
        if op.name != "tt.join":
            return self._copied(op, self._read(op.operands[0], self._sources(op, of.lanes, result)), of)
        sides = of.lanes % _TWO
        if op.operands[0] == op.operands[1] or not np.ptp(sides):
            which = int(sides.flat[0]) if not np.ptp(sides) else 0
            return self._copied(op, self._read(op.operands[which], self._sources(op, of.lanes, result)), of)
        each = [self._read(n, self._sources(op, of.lanes, result)) for n in op.operands]
        type_, mask = _typed(self._type(result), of.lanes.shape), f"{of.name}@side"
        bits = re.sub(r"x(\w+)>$", "xi1>", type_)
        side = LanesOp(LANE_MASK, [mask], [], f"{LANE_MASK} : {bits}", bits, op.line, lanes=1 - sides)
        self._before.append(side)
        text = f"arith.select : {bits}, {type_}"
        return Op("arith.select", [of.name], [mask, *each], text, f"{bits}, {type_}", op.line, place=op.place)

    def _copied(self, op: Op, source: str, of: _Wanted) -> Op:
        type_ = _typed(self._type(op.results[0]), of.lanes.shape)
        name = "ttg.convert_layout"
        return Op(name, [of.name], [source], f"{name} : {type_} -> {type_}", type_, op.line, place=op.place)

    def _reduced(self, op: Op, of: _Wanted) -> Op:
        """Return a reduction of lanes, each along the columns of a block."""
        if len(op.operands) != 1:
            raise OtherBlocksError
        before, axis = self._shape(op.operands[0]), op.number("axis")
        along = np.moveaxis(_all(before), axis, -1).reshape(-1, before[axis])[of.lanes]
        if of.lanes.ndim > 1:
            return self._pairs(op, of, along)
        source = self._read(op.operands[0], along)
        text = re.sub(r"axis = \d+", f"axis = {along.ndim - 1}", op.text)
        parts = text.rpartition(" : ")
        types = TYPES.findall(parts[2])
        text = f"{parts[0]} : ({_typed(types[0], along.shape)}) -> {_typed_from(op.type, of.lanes.shape)}"
        return replace(op, results=[of.name], operands=[source], text=text, type=_typed_from(op.type, of.lanes.shape))

    def _pairs(self, op: Op, of: _Wanted, along: Integers) -> Op:
        """Return a reduction of two elements, whose order has no effect, as an operation on both."""
        inner = [o.name for o in op.body]
        if along.shape[-1] != _TWO or len(inner) != _TWO or inner[0] not in _OF_PAIRS:
            raise OtherBlocksError
        sides = [self._read(op.operands[0], along[..., i]) for i in range(_TWO)]
        type_ = _typed(self._type(op.operands[0]), of.lanes.shape)
        return Op(inner[0], [of.name], sides, f"{inner[0]} : {type_}", type_, op.line)

    def _scanned(self, op: Op, of: _Wanted) -> Op:
        """Return a scan of whole rows of lanes, along the columns of a block."""
        shape, axis = self._shape(op.operands[0]), op.number("axis")
        rows = np.moveaxis(_all(shape), axis, -1).reshape(-1, shape[axis])
        is_whole = of.lanes.ndim == _TWO and of.lanes.shape[1] == shape[axis] and len(op.operands) == 1
        first = {int(r[0]): r for r in rows}
        if not is_whole or not all(np.array_equal(first.get(int(r[0]), ()), r) for r in of.lanes):
            raise OtherBlocksError
        text = _typed(re.sub(r"axis = \d+", "axis = 1", op.text), of.lanes.shape)
        source = self._read(op.operands[0], of.lanes)
        return replace(op, results=[of.name], operands=[source], text=text, type=_typed(op.type, of.lanes.shape))


def _reduces(name: str, made: Mapping[str, Op]) -> bool:
    """Return whether a value is computed from a reduction of a block of three axes."""
    op = made.get(name)
    if op is None or op.name in ("tt.load", _PRODUCT):
        return False
    return (op.name == "tt.reduce" and len(_operand_shape(op)) > _TWO) or any(_reduces(n, made) for n in op.operands)


def _all(shape: tuple[int, ...]) -> Integers:
    """Return the places of all lanes of a block."""
    return np.arange(prod(shape)).reshape(shape)


def _typed(text: str, shape: tuple[int, ...]) -> str:
    """Return a text in which blocks have another shape."""
    return _SHAPE.sub("tensor<" + "".join(f"{n}x" for n in shape), text)


def _typed_from(type_: str, shape: tuple[int, ...]) -> str:
    """Return a type with another shape; the given type may be that of a block or of one number."""
    if not shape:
        return type_
    return _typed(type_, shape) if type_.startswith("tensor") else f"tensor<{''.join(f'{n}x' for n in shape)}{type_}>"


def _in_order(operations: Sequence[Op]) -> Iterator[Op]:
    """Yield operations in the order of the text, each before the operations inside of it."""
    for op in operations:
        yield op
        if op.name not in _JOINED:
            yield from _in_order([*op.body, *op.otherwise])
