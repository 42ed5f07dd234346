"""Blocks that are summed along both of their axes, as one row of their elements: the same TTIR on blocks of one axis.

The row has the block's rows one after another.  The computation on each element is the same; integers and masks of
indices describe rows and columns, and are converted for the row where a load, selection or store of floats uses them.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from npusim.kernels.triton.listed import unlike_rows
from npusim.kernels.triton.region_rewriter import OtherBlocksError, RegionRewriter
from npusim.kernels.triton.ttir_text import FORMATS, TYPES, Function, Op, every_of, shape_of
from npusim.kernels.triton.values import (
    Affine,
    Condition,
    Elements,
    Integers,
    Known,
    Listed,
    ListedMask,
    Number,
    answers,
    bound_of,
    constant,
    reshaped,
    truth,
)

#: An operation that TTIR does not have: it converts integers or a mask of a block of rows and columns, or along one
#: axis of the block, to the row of the block's elements.
FLATTENED = "npusim.flattened"
#: Another operation that TTIR does not have: pointers of a row that follow a table, without the last entries, which a
#: mask hides in every program.
TRIMMED = "npusim.trimmed"
#: Operations that may be between a sum of rows and the sum of these sums.
OF_SUMS = " and then "
#: Operations that leave a block unchanged.
_SAME = "ttg.convert_layout"
#: Operations on blocks with special rules of axes, which no block here has.
_OTHERS = ("tt.dot", "tt.trans", "tt.join", "tt.split", "tt.cat", "tt.scan", "tt.gather", "tt.descriptor", "tt.atomic")
_RANK = 2
#: Operations with regions; and number of a loop's operands that precede the values that the loop carries.
_REGIONS, _BOUNDS = ("tt.reduce", "scf.for", "scf.if"), 4


def with_blocks_as_rows(function: Function) -> Function | None:
    """Return a kernel in which blocks that are summed along both axes are rows; None if there are no such blocks, or if
    there are others.
    """
    operations = every_of(function.operations)
    if any((o.body and o.name not in _REGIONS) or o.name.startswith(_OTHERS) for o in operations):
        return None
    result = {r: o for o in operations for r in o.results} | carried_by(operations)
    wide = {_operand_type(o) for o in operations if _joins_axes(o, result)}
    blocks = {shape for shape in wide if len(shape) == _RANK and min(shape) > 1}
    if len(blocks) != 1:
        return None
    try:
        return function._replace(operations=_Rows(operations, result, blocks.pop()).changed(function.operations))
    except OtherBlocksError:
        return None


def carried_by(operations: list[Op]) -> dict[str, Op]:
    """Return the values that loops carry, and their results, each as an operation with its type."""
    result = dict[str, Op]()
    for op in operations:
        if op.name == "scf.for" and len(op.operands) > _BOUNDS:
            types = TYPES.findall(op.text.partition("-> (")[2])
            for names in (op.operands[_BOUNDS::2], op.results):
                result |= {n: Op("scf.carried", [n], [], "", t, op.line) for n, t in zip(names, types, strict=False)}
    return result


def _operand_type(op: Op) -> tuple[int, ...]:
    """Return the shape of the operand of a reduction or of another change of axes."""
    return shape_of(TYPES.findall(op.text.rpartition(" : ")[2])[0])[0]


def _joins_axes(op: Op, made: dict[str, Op]) -> bool:
    """Return whether an operation creates one axis of a block, or reduces one axis before a later operation reduces the
    other.
    """
    if op.name == "tt.reshape":
        return len(shape_of(op.type)[0]) == 1
    is_first = op.name == "tt.reduce" and len(op.operands) == 1 and len(_operand_type(op)) == _RANK
    return is_first and any(o.name == "tt.reduce" and o.operands == op.results for o in made.values())


class _Rows(RegionRewriter):
    """The operations of a kernel on rows in place of blocks of some ``shape``."""

    def __init__(self, operations: list[Op], made: dict[str, Op], shape: tuple[int, ...]) -> None:
        super().__init__(operations, made)
        self.rows, self.columns = shape
        self._read = self._vectors_read()

    def rewrite(self, op: Op) -> None:
        """Add an operation on rows."""
        if op.name in _REGIONS and op.name != "tt.reduce":
            body, otherwise = self.changed(op.body), self.changed(op.otherwise)
            self.ordered.append(replace(op, body=body, otherwise=otherwise, text=self._typed(op.text)))
        elif op.name == "tt.store":
            self._store(op)
        elif not op.results or not self._is_float(op.results[0]):
            self.ordered.append(op)
        elif op.name == "tt.reduce":
            self._reduce(op)
        elif op.name == "tt.reshape" and len(_operand_type(op)) == _RANK:
            self._same(op, op.operands[0])
        elif len(self.shape(op.results[0])) == _RANK:
            self._block(op)
        elif len(self.shape(op.results[0])) != 1 or op.results[0] in self._read or self._is_row(op):
            self.ordered.append(op)

    def _is_row(self, op: Op) -> bool:
        return self.shape(op.results[0]) == (self.rows * self.columns,)

    def _is_float(self, name: str) -> bool:
        """Return whether a value is a block of floats, or a mask of compared values."""
        op = self.made.get(name)
        if op is None or "tt.ptr" in op.type:
            return op is not None and op.name == "tt.load" and shape_of(op.type)[1] in FORMATS
        types = TYPES.findall(op.type)
        is_float = op.name == "arith.cmpf" or (bool(types) and shape_of(types[-1])[1] in FORMATS)
        return is_float or (op.name != "tt.load" and any(map(self._is_float, op.operands)))

    def _vectors_read(self) -> set[str]:
        """Return the vectors of floats that operations on vectors or numbers read; operations on blocks of rows and
        columns read rows instead.
        """
        read = set[str]()
        for op in reversed(self.operations):
            is_vector = not op.results or len(self.shape(op.results[0])) < _RANK
            if is_vector and (not op.results or len(self.shape(op.results[0])) == 0 or op.results[0] in read):
                read |= {n for n in op.operands if len(self.shape(n)) == 1}
        return read

    def _typed(self, text: str, axis: int | None = None) -> str:
        """Return a text with the row's type in place of the type of a block, or of a vector along one of the block's
        axes.
        """
        sizes = rf"(?:{self.rows}|1)x(?:{self.columns}|1)" if axis is None else f"{(self.rows, self.columns)[axis]}"
        return re.sub(rf"tensor<{sizes}x(?=!|[a-z])", f"tensor<{self.rows * self.columns}x", text)

    def _block(self, op: Op) -> None:
        """Add an operation on a block of floats as an operation on a row."""
        if any(
            n not in (1, whole) for n, whole in zip(self.shape(op.results[0]), (self.rows, self.columns), strict=True)
        ):
            raise OtherBlocksError
        if op.name == "tt.expand_dims":
            self._same(op, self._along(op.operands[0], 1 - op.number("axis")))
        elif op.name == "tt.broadcast" and self._is_float(op.operands[0]):
            self._same(op, op.operands[0])
        else:
            operands = self._trimmed(op, [self._operand(n) for n in op.operands])
            self.ordered.append(replace(op, operands=operands, text=self._typed(op.text), type=self._typed(op.type)))

    def _same(self, op: Op, source: str) -> None:
        self.ordered.append(replace(op, name=_SAME, operands=[source], type=self._typed(op.type)))

    def _operand(self, name: str) -> str:
        """Return a block's operand: either a block of floats, which is a row, or integers in the form of those of a
        row.
        """
        is_block = len(self.shape(name)) == _RANK
        return self._flattened(name, -1) if is_block and not self._is_float(name) else name

    def _flattened(self, name: str, axis: int) -> str:
        """Return integers of the block, or along one of its axes, in the form of integers of a row."""
        if (name, axis) not in self.known:
            self.known[name, axis] = result = f"{name}@row{axis + 1}"
            text = f"{FLATTENED} rows = {self.rows}, columns = {self.columns}, axis = {axis}"
            op = self.made[name]
            self.ordered.append(Op(FLATTENED, [result], [name], text, self._typed(op.type), op.line))
        return self.known[name, axis]

    def _trimmed(self, op: Op, operands: list[str]) -> list[str]:
        """Return a load's operands with a pointer that addresses only elements that the load's mask does not hide."""
        if op.name != "tt.load" or len(operands) < _RANK:
            return operands
        pointer, mask, *others = operands
        self.ordered.append(Op(TRIMMED, [f"{op.results[0]}@at"], [pointer, mask], TRIMMED, "", op.line))
        return [f"{op.results[0]}@at", mask, *others]

    def _along(self, name: str, axis: int) -> str:
        """Return a vector of floats along an axis of the block, as a row that repeats its elements."""
        op = self.made[name]
        if op.name in ("tt.reduce", "tt.reshape") or len(op.results) != 1:
            raise OtherBlocksError
        if (name, axis) not in self.known:
            result, operands = f"{name}@row{axis + 1}", list[str]()
            for n in op.operands:
                own = self._along if self._is_float(n) else self._flattened
                operands.append(own(n, axis) if len(self.shape(n)) == 1 else n)
            text, type_ = (self._typed(t, axis) for t in (op.text, op.type))
            operands = self._trimmed(op, operands)
            self.ordered.append(replace(op, results=[result], operands=operands, text=text, type=type_))
            self.known[name, axis] = result
        return self.known[name, axis]

    def _reduce(self, op: Op) -> None:
        """Add a reduction of a block along one axis and then along the other, at the place of the second reduction."""
        before = self.made.get(op.operands[0])
        if len(op.operands) == 1 and len(_operand_type(op)) == 1:
            if before is None or before.name != "tt.reduce":
                self.ordered.append(op)
                return
            if op.body[0].name != before.body[0].name:
                raise OtherBlocksError
            text = re.sub(r"\baxis = \d+", f"axis = 0, columns = {self.columns}", self._typed(before.text))
            text = f"{text.rpartition(' -> ')[0]} -> {op.type}"
            place = f"{before.place}{OF_SUMS}{op.place}"
            self.ordered.append(replace(op, operands=before.operands, text=text, body=before.body, place=place))
            return
        readers = [o for o in self.operations if op.results[0] in o.operands]
        is_last = op.number("axis") == 1 and len(op.operands) == 1
        if not is_last or not readers or any(o.name != "tt.reduce" for o in readers):
            raise OtherBlocksError

    def _store(self, op: Op) -> None:
        if len(self.shape(op.operands[0])) == _RANK:
            op = replace(op, operands=[self._operand(n) for n in op.operands])
        self.ordered.append(op)


def flattened(op: Op, x: Known) -> Known:
    """Return a block's integers, or its mask, in the form of those of the row of its elements.

    A mask that hides columns has the row's elements as a table.
    """
    rows, columns, axis = op.number("rows"), op.number("columns"), op.number("axis")
    if axis >= 0:
        x = reshaped(x, (rows, 1) if axis == 0 else (1, columns), lambda s, none: (s[0], none)[:: 1 - 2 * axis])
    x = reshaped(x, (rows, columns), lambda s, _: s)
    if isinstance(x, Affine):
        return _row_of(op, x)
    if isinstance(x, Condition):
        either = tuple(tuple(_rules_of(op, c) for c in group) for group in x.either)
        hides = [rule for rule in x.of if _linear_rule(op, rule) is None] if not either else []
        rest = replace(x, of=tuple(rule for rule in x.of if rule not in hides), either=())
        linear = replace(_rules_of(op, rest), either=either) if rest.of or not hides else None
        return _by_elements(op, Condition(tuple(hides)), linear) if hides else linear or rest
    if isinstance(x, Elements):
        return replace(x, values=x.values.reshape(*x.values.shape[:2], rows * columns))
    if isinstance(x, Number):
        return replace(x, shape=(rows * columns,))
    raise op.fail(
        "a block that is summed along both of its axes is masked or addressed by loaded integers; only "
        "sizes and indices are supported there"
    )


def _rules_of(op: Op, x: Condition) -> Condition:
    """Return comparisons of a block in the form of comparisons of a row: a bound on rows becomes a bound on elements;
    other comparisons must be linear.
    """
    result = list[tuple[str, Affine]]()
    for rule in x.of:
        if (linear := _linear_rule(op, rule)) is None:
            why = (
                "a mask with an or hides columns of a block that is summed along both of its axes, which is not "
                "supported"
            )
            raise op.fail(f"{why}; use a block with as many columns as the tensor, or sum the rows in a loop")
        result.append(linear)
    return Condition(tuple(result))


def _linear_rule(op: Op, rule: tuple[str, Affine]) -> tuple[str, Affine] | None:
    """Return a comparison of a block in the form of a comparison of a row; None if it is not linear in the
    row's index.
    """
    relation, d = rule
    (down, along), bound = d.shape, bound_of(d, relation)
    size = down * along
    if np.all(answers(Condition((rule,)))[0]):
        return "slt", constant(-1, (size,))
    if bound is not None and bound[0] == 0:
        return "slt", Affine(-bound[1] * along, (1,), (size,))
    return (relation, row) if isinstance(row := _row_of(op, d), Affine) else None


def _by_elements(op: Op, hides: Condition, within: Condition | None) -> ListedMask:
    """Return a mask that hides columns as a table of the row's elements; equal iterations share entries of the
    table.
    """
    holds = truth(op, hides)
    n = holds.shape[2] * holds.shape[3]
    kinds, of_each = unlike_rows(holds.reshape(-1, n).astype(np.int64))
    base = of_each.reshape(holds.shape[:2]) * n
    return ListedMask(kinds.astype(bool).reshape(-1), Affine(base, (1,), (n,)), within)


def _row_of(op: Op, x: Affine) -> Affine | Listed:
    """Return integers of a block in the form of those of a row: linear, or by a table that all programs share."""
    (rows, columns), (down, along), (first, last) = x.shape, x.steps, x.limits()
    if last is not None and np.any(last < columns):
        raise op.fail(
            "a mask hides columns of integers that index a block that is summed along both of its axes; this "
            "is not supported"
        )
    shape, left = (rows * columns,), (None if first is None else first * columns,)
    if down == along * columns:
        return replace(x, steps=(along,), shape=shape, left=left)
    table: Integers = (down * np.arange(rows)[:, None] + along * np.arange(columns)).reshape(-1)
    rest = replace(x, steps=(0,), shape=shape, left=())
    return Listed(rest, table, Affine(np.zeros((1, 1), np.int64), (1,), shape, left=left))


def trimmed(x: Known, mask: Known) -> Known:
    """Return pointers whose table ends before the last entries that a mask hides in every program; other pointers are
    unchanged.
    """
    bounds = [bound_of(d, relation) for relation, d in mask.of] if isinstance(mask, Condition) else []
    known = [int(bound[1].max()) for bound in bounds if bound is not None]
    return replace(x, table=x.table[: min(known)]) if isinstance(x, Listed) and known and min(known) else x
