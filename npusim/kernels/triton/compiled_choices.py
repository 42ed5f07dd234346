"""Choices of the compiled code that decide bits: the order of each sum, and which products and sums are contracted.

TTGIR states the layout of each reduction's operand.  LLVM contracts a multiplication and an addition where PTX has an
``fma``; ptxas contracts further ones, which a second assembly without contraction reveals.  Both depend on how values
are packed and unrolled, so that configurations of one kernel differ.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import reduce
from hashlib import sha256
from math import gcd, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.formats.reductions import MMA_LANES, in_trees, lanes_order, normal_order
from npusim.kernels.triton import ROUNDED
from npusim.kernels.triton import UNKNOWN as UNKNOWN  # noqa: PLC0414 - readers of choices compare with it
from npusim.kernels.triton.ttir_text import Locations, operand_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

#: Rows that a warp of a matrix unit's result holds, and lanes along them (PTX ISA, m16n8 and wgmma).
_MMA_ROWS, _MMA_ROW_LANES = 16, 8
_LAYOUT = re.compile(r"^(#\w+) = (#ttg\.\w+<\{.*\}>)$", re.MULTILINE)
_REDUCTION = re.compile(r"\}\) : \(tensor<((?:\d+x)+)\w+(?:, (.*))?>\) -> ")
#: Operations of reductions whose results have the same bits in any order.
_FREE = re.compile(r"= arith\.(?:max\w+|min\w+|addi|andi|ori|xori) ")
_AXIS = re.compile(r'"tt\.(?:reduce|scan)"\((%\w+).*?axis = (\d+)')
#: Operations after which the order of a block's elements differs from that of its indices.
_REORDERED = re.compile(r"(%\w+) = tt\.reshape %\w+ allow_reorder.* : tensor<((?:\d+x)+)\w+, (.*)> -> ")
_CONVERTED = re.compile(r"(%\w+) = ttg\.convert_layout (%\w+) ")


# ---------------------------------------------------------------- orders of reductions


def orders_of(ttgir: str, *, is_tree: bool = False) -> dict[str, str]:
    """Return the order in which each reduction or scan adds; the key is
    `npusim.kernels.triton.ttir_text.Locations.place` with the operand's shape.

    ``is_tree``: whether a thread adds its own elements as a tree.  Maxima and minima, whose order is free, are omitted.
    ``?`` if the layout has no form of `npusim.formats.reductions`, or if two reductions of one place differ. If a block
    becomes one axis with its elements in any order (``tl.sum(x)``), these stay in their threads (PTX of Triton 3.6), so
    that the order is that of the block's layout.
    """
    layouts, where, orders, axis, is_sum = dict(_LAYOUT.findall(ttgir)), Locations(ttgir), dict[str, str](), -1, False
    blocks, of = dict[str, str](), ""
    for line in ttgir.splitlines():
        if reordered := _REORDERED.search(line):
            name, sizes, layout = reordered.groups()
            blocks[name] = _order_by_rows([int(n) for n in sizes.split("x")[:-1]], layouts.get(layout, layout) or "")
        elif (converted := _CONVERTED.search(line)) and converted[2] in blocks:
            blocks[converted[1]] = UNKNOWN
        elif begun := _AXIS.search(line):
            of, axis, is_sum = begun[1], int(begun[2]), False
        elif axis >= 0 and (ended := _REDUCTION.search(line)):
            if is_sum:
                size = int(ended[1].split("x")[axis])
                first, *others = (ended[2] or "").split(">, tensor<")
                place, order = where.place(line) + operand_shape(line), _order(first, axis, layouts)
                # this is a maximum with its index, whose order is free
                if any(re.match(r"(?:\d+x)+i\d", x) for x in others):
                    order = UNKNOWN
                order = blocks.get(of, order)
                order = normal_order(order, size)
                order = in_trees(order) if is_tree else order
                orders[place] = order if orders.get(place, order) == order else UNKNOWN
            axis = -1
        elif axis >= 0:
            is_sum |= not _FREE.search(line) and re.search(r"= (?:arith|math)\.", line) is not None
    return orders


def _order(layout: str, axis: int, layouts: Mapping[str, str]) -> str:
    """Return the order of a sum along an axis of a layout."""
    text = layouts.get(layout, layout)
    if sliced := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", text):
        return _order(sliced[2], axis + (axis >= int(sliced[1])), layouts)
    numbers = _numbers(text)
    if text.startswith("#ttg.blocked") and "CGALayout" not in numbers:
        return lanes_order(*(numbers[n][axis] for n in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")))
    if text.startswith("#ttg.nvidia_mma"):
        is_row, warps = axis < len(numbers["warpsPerCTA"]) - 1, numbers["warpsPerCTA"][axis]
        if is_row:
            return lanes_order(1, _MMA_ROW_LANES, warps, _MMA_ROWS)
        # The last axes of an instruction are rows and columns; after them (wgmma) comes the depth.
        columns = numbers["instrShape"][axis]
        return "mma_lanes" if warps == 1 else lanes_order(*MMA_LANES[:2], warps, columns)
    return UNKNOWN


def _numbers(layout: str) -> dict[str, list[int]]:
    """Return the numbers that a layout lists, by name."""
    return {n: [int(x) for x in listed.split(", ")] for n, listed in re.findall(r"(\w+) = \[([\d, ]+)\]", layout)}


def _order_by_rows(shape: Sequence[int], layout: str) -> str:
    """Return the order of a sum of all elements of a block of rows, if its threads have these elements row after row;
    otherwise ``?``.

    Neighbours, lanes, warps and then registers continue along a row before the next row begins.  After the last row
    lanes and warps repeat it.
    """
    numbers, last = _numbers(layout), len(shape) - 1
    if not layout.startswith("#ttg.blocked") or "CGALayout" in numbers or numbers["order"] != [*range(last, -1, -1)]:
        return UNKNOWN
    parts = [numbers[n] for n in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")]
    covered = [1] * len(shape)
    for part in parts:
        for axis in range(last, -1, -1):
            is_next = part[axis] == 1 or all(covered[i] == shape[i] for i in range(axis + 1, last + 1))
            covered[axis] *= part[axis]
            first = next((i for i, n in enumerate(shape) if n > 1), last)
            if not is_next or (axis > first and covered[axis] > shape[axis]):
                return UNKNOWN
    begun = next((i for i, n in enumerate(covered) if n > 1), last)
    if any(covered[i] < shape[i] for i in range(begun + 1, last + 1)):
        return UNKNOWN
    neighbours, lanes, warps = map(prod, parts)
    return lanes_order(neighbours, lanes, warps)


# ---------------------------------------------------------------- products

#: A product: whether warp groups compute it, the number of terms after which their sum is added in float32, its depth,
#: the format of its factors as an instruction reads them, and their layout.
_DOT = re.compile(
    r"(tt\.dot|ttng\.warp_group_dot) (?:.*?maxNumImpreciseAcc = (\d+))?.*? "
    r": (?:tensor|!ttg\.memdesc)<(?:\d+x)+?(\d+)x([a-z]\w*), (.*?)> \* "
)
#: Neighbours along the depth that a lane holds of a factor.
_NEIGHBOURS = re.compile(r"#ttg\.dot_op<\{.*\bkWidth = (\d+)")
#: Of these, the ones that one register holds, by format: with more, an instruction multiplies every other register.
_PACKED = MappingProxyType({"f16": 2, "bf16": 2, "f32": 1})
#: Units for products that are not a device's own, after the name of its architecture.
IN_TURNS, IN_ONE_TURN, IN_PARTS = "mma_half.k{}", "mma_quad.k{}", "wgmma_late.k{}"
#: Lanes along the depth of a factor, and how often an instruction reads a register of each.
_LANES, _READS = 4, 2


def units_of(ttgir: str) -> dict[str, tuple[str, str]]:
    """Return, for each place of a product in compiled code, the format of its factors as an instruction reads them, and
    its unit; the unit is empty for a device's own, and ``?`` if products of one place differ.

    The place is `npusim.kernels.triton.ttir_text.Locations.place`. ``mma_half.k32``: the code converts narrower
    elements or joins two blocks, so that each of four lanes holds four neighbours along the depth and four of the next
    sixteen; each of two instructions multiplies a pair of them. ``mma_quad.k16``: the same with sixteen elements in
    all.
    ``mma_half.k64/16``: fewer than the lanes hold, of which Triton 3.6 multiplies a part twice. ``wgmma_late.k64``:
    sums of 64 terms are added to the accumulator (``max_num_imprecise_acc``).
    """
    where, units = Locations(ttgir), dict[str, tuple[str, str]]()
    for line in ttgir.splitlines():
        if dot := _DOT.search(line):
            kind, most, depth, fmt, layout = dot.groups()
            place, of = where.place(line), (fmt, _unit(kind, int(most or 0), int(depth), fmt, layout))
            units[place] = of if units.get(place, of) == of else (fmt, UNKNOWN)
    return units


def _unit(kind: str, terms: int, depth: int, fmt: str, layout: str) -> str:
    """Return the unit of a product; empty for a device's own."""
    if kind != "tt.dot":
        return IN_PARTS.format(terms) if fmt.startswith("f8") and 0 < terms <= depth else ""
    held, packed = _NEIGHBOURS.search(layout), _PACKED.get(fmt, 0)
    if not held or not packed or int(held[1]) == packed:
        return ""
    at_once = _LANES * int(held[1])
    if depth == at_once:
        return IN_ONE_TURN.format(depth)
    in_turns = IN_TURNS.format(_READS * at_once)
    return in_turns if depth > at_once else f"{in_turns}/{depth}"


# ---------------------------------------------------------------- contraction

_FILE = re.compile(r'^\s*\.file\s+(\d+) "(?:[^"]*/)?([^"/]*)"', re.MULTILINE)
_LOC = re.compile(r"\.loc\s+(\d+) (\d+) (\d+)(?:, function_name \S+ inlined_at (\d+) (\d+) (\d+))?")
_INSTRUCTION = re.compile(r"(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*?);")
_REGISTER, _OPERAND = re.compile(r"%[a-z]+\d+"), re.compile(r"\{[^}]*\}|[^,{}]+")
#: Arithmetic on floats; a packed pair of 16-bit numbers counts as two.
_ARITHMETIC = re.compile(
    r"(fma|mul|add|sub|neg|div)((?:\.(?:rn|rz|ftz|sat|full|approx))*\.(?:f32|f64|f16|bf16))(?:x2)?$"
)
_SPECIAL = re.compile(r"(?:ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos|div)\..*f(?:32|64|16)")
_PRODUCT = re.compile(
    r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+(k\d+)\.(?:row\.col\.)?(f32\.(?:bf16|f16)\b)?\S*"
)
#: Instructions that copy or choose a value: their operands are the value's sources.
_COPIES, _PRODUCTS = ("mov.", "selp."), ("mul", "div")


class _Arithmetic(NamedTuple):
    """One instruction of arithmetic: its kind, its place in the kernel's source, and its operands."""

    kind: str
    place: str
    operands: Sequence[str]

    def __str__(self) -> str:
        return f"{self.kind}@{self.place}"


class Contraction(NamedTuple):
    """The contractions of compiled code: code with the same ``digest`` contracts the same operations of the source.

    ``addends``: by the place of each addition that contracts a product (in the same way for all elements), the place of
    the other product that it adds; empty if its other operand is no product, and `ROUNDED` if it contracts none of its
    products, as an addition in a loop with products before the loop. ``sums``: by the place of each product to which an
    addition adds another, contracted product, the place of that addition; the contracted product may come from another
    lane. ``further``: lines of the source, FILE:LINE, whose additions ptxas contracts and PTX does not.
    """

    digest: str
    addends: Mapping[str, str]
    sums: Mapping[str, str] = MappingProxyType({})
    further: Sequence[str] = ()


def contraction_of(ptx: str, ttgir: str, assembled: Callable[[], Sequence[str]]) -> Contraction:
    """Return what compiled code contracts.

    ``assembled``: the lines of machine code with and without ptxas's contraction, requested if ptxas can contract more
    operations; none if both codes are equal. If an operation of the source is contracted for only some elements, the
    digest covers all instructions.
    """
    code, copies = _arithmetic(ptx)
    code = _placed(code, ptx, ttgir)
    sources = _Sources(code, copies)
    # If products and sums of the source preserve subnormals, an fma that does not belongs to a library.
    keeps = not any(each.kind.startswith(("mul.ftz", "add.ftz")) for each in code)
    own = [each for each in code if not (keeps and each.kind.startswith("fma.rn.ftz"))]
    forms = Counter(form for each in own for form in _forms(each, sources))
    parts = sorted({*forms, *map(_product, _PRODUCT.finditer(ptx)), *_SPECIAL.findall(ptx)})
    has_more = any(re.search(r" plain .*\b(?:mul|div)\.(?!rn)", form) for form in forms)
    further = _further(assembled) if has_more else {}
    parts += [f"ptxas {line} {share}" for line, share in further.items()]
    if _is_uneven(forms, _additions(ttgir)):
        parts += [f"{each} {' '.join(each.operands)}" for each in code]
    digest = sha256("\n".join(parts).encode()).hexdigest()[:16]
    addends = _addends(forms) | dict.fromkeys(_rounded(forms, further), ROUNDED)
    return Contraction(digest, addends, _sums(forms, code), tuple(further))


def _addends(forms: Iterable[str]) -> dict[str, str]:
    """Return `Contraction.addends` for the additions that have one form."""
    by_place = dict[str, list[str]]()
    for form in forms:
        place, _, rest = form.partition(" ")
        by_place.setdefault(place, []).append(rest)
    alone = {place: found[0] for place, found in by_place.items() if len(found) == 1}
    fused = {place: form.partition(", ")[2] for place, form in alone.items() if form.startswith("fused")}
    return {place: addend.partition("@")[2] for place, addend in fused.items() if " or " not in addend}


def _rounded(forms: Iterable[str], further: Collection[str]) -> Iterator[str]:
    """Yield the places of additions that contract none of their products, neither in PTX nor in machine code."""
    by_place = dict[str, list[str]]()
    for form in forms:
        place, _, rest = form.partition(" fused " if " fused " in form else " plain ")
        by_place.setdefault(place, []).append("" if " fused " in form else rest)
    for place, found in by_place.items():
        lines = {part.rpartition(":")[0] for part in place.split(" at ")}
        if all(found) and all(re.search(r"\bmul\.(?!rn)", rest) for rest in found) and not lines & {*further}:
            yield place


def _sums(forms: Iterable[str], code: Sequence[_Arithmetic]) -> dict[str, str]:
    """Return `Contraction.sums`: for each product to which an addition adds another product, the place of the addition.

    Lanes with one element each shuffle their rounded products, and each lane's addition contracts its own product
    again.
    """
    products = {tuple(each.operands): each.place for each in code if each.kind.startswith("mul")}
    own = ((products.get(tuple(each.operands[:2])), each.place) for each in code if each.kind.startswith("fma"))
    sums = {product: place for product, place in own if product}
    for form in forms:
        place, _, rest = form.partition(" fused ")
        if "@" in rest:
            sums |= {each.partition("@")[2]: place for each in rest.partition(", ")[2].split(" or ")}
    return sums


def _arithmetic(ptx: str) -> tuple[list[_Arithmetic], dict[str, list[str | int]]]:
    """Return the arithmetic of PTX, and the sources of each register: registers, constants, numbers of instructions."""
    code, sources = list[_Arithmetic](), dict[str, list[str | int]]()
    for name, first, rest, place in _instructions(ptx):
        result = list[str | int]()
        if kind := _ARITHMETIC.match(name):
            result = [len(code)]
            code.append(_Arithmetic(kind[1] + kind[2], place, rest))
        elif name.startswith(_COPIES):
            result = [r for x in rest[: 1 + name.startswith("selp")] for r in _REGISTER.findall(x) or [x]]
        for register in _REGISTER.findall(first):
            sources.setdefault(register, []).extend(result)
    return code, sources


def _instructions(ptx: str) -> Iterator[tuple[str, str, list[str], str]]:
    """Yield the name of each instruction of PTX, its first operand and the others, and its place in the kernel."""
    files, place = dict(_FILE.findall(ptx)), ""
    for line in map(str.strip, ptx.splitlines()):
        if match := _LOC.match(line):
            parts = [match.groups()[i : i + 3] for i in (0, 3) if match[i + 1]]
            place = " at ".join(f"{files.get(file, '')}:{row}:{column}" for file, row, column in parts)
        elif match := _INSTRUCTION.match(line):
            first, *rest = [x.strip() for x in _OPERAND.findall(match[2])] or [""]  # a fence has no operand
            yield match[1], first, rest, place


# LLVM joins equal operations of one line to vectors, which have the place of the first operation.  The product
# of an instruction is then identified by the loads from which its factors come.

_DEFINED = re.compile(r'^\s*(%\w+) = "?([\w.]+)"?\(?(.*)$')
_VALUE = re.compile(r"%\w+")
#: Operations of TTGIR through which the origin of a value is followed to loads, and instructions at which this ends.
_FOLLOWED = ("arith.", "math.", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.fp_to_fp", "ttg.convert_layout")
_UNKNOWN_SOURCES = ("shfl", "ld.shared", "ldmatrix", "mma", "wgmma", "atom")


def _placed(code: list[_Arithmetic], ptx: str, ttgir: str) -> list[_Arithmetic]:
    """Return arithmetic in which each product has the place of the product of the source with the same factors."""
    products = _loads_of_products(ttgir)
    if len(products) < 2:
        return code
    registers, placed = _Registers(ptx), list[_Arithmetic]()
    for each in code:
        if each.kind.startswith("mul") and each.place in products:
            loads = registers.loads(each.operands[:2])
            alike = [place for place, of in products.items() if of == loads]
            if loads and loads != products[each.place] and len(alike) == 1:
                each = each._replace(place=alike[0])  # noqa: PLW2901
        placed.append(each)
    return placed


def _loads_of_products(ttgir: str) -> dict[str, frozenset[str]]:
    """Return, by the place of each product, the places of the loads from which its factors come; products without such
    loads are omitted.
    """
    where, known, products = Locations(ttgir), dict[str, frozenset[str] | None](), dict[str, frozenset[str] | None]()
    for line in ttgir.splitlines():
        if not (match := _DEFINED.match(line)):
            continue
        name, operation, rest = match.groups()
        loads: frozenset[str] | None = None
        if operation == "tt.load":
            loads = frozenset([where.place(line)])
        elif operation == "arith.constant":
            loads = frozenset()
        elif operation.startswith(_FOLLOWED):
            sources = [known.get(x) for x in _VALUE.findall(rest.partition(" : ")[0])]
            loads = None if None in sources else frozenset().union(*(x for x in sources if x is not None))
        known[name] = loads
        if operation == "arith.mulf":
            place = where.place(line)
            products[place] = loads if products.get(place, loads) == loads else None
    return {place: loads for place, loads in products.items() if loads is not None}


class _Registers:
    """The loads from which registers of PTX come, through packed pairs element by element."""

    def __init__(self, ptx: str) -> None:
        self._made: dict[str, list[str | None]] = {}
        packed = dict[str, list[str]]()
        for name, first, rest, place in _instructions(ptx):
            result, sources = _REGISTER.findall(first), [r for x in rest for r in _REGISTER.findall(x)]
            is_move = name.startswith("mov.")
            if is_move and len(sources) > 1 and len(result) == 1:
                packed[result[0]] = sources
            elif is_move and len(result) > 1 and sources and len(packed.get(sources[0], ())) == len(result):
                for register, source in zip(result, packed[sources[0]], strict=True):
                    self._made.setdefault(register, []).append(source)
                continue
            if name.startswith("ld.global"):
                sources = ["@" + place]
            unknown = [None] if name.startswith(_UNKNOWN_SOURCES) else []
            for register in result:
                self._made.setdefault(register, []).extend([*sources, *unknown])

    def loads(self, operands: Sequence[str]) -> frozenset[str] | None:
        """Return the places of the loads from which operands come; None if one is not known."""
        waiting: list[str | None] = [r for x in operands for r in _REGISTER.findall(x)]
        seen, found = set[str](), set[str]()
        while waiting:
            source = waiting.pop()
            if source is None:
                return None
            if source.startswith("@"):
                found.add(source[1:])
            elif source not in seen:
                seen.add(source)
                waiting += self._made.get(source, ())
        return frozenset(found)


class _Sources:
    """The products among the sources of a value, also through copies and changes of sign."""

    def __init__(self, code: Sequence[_Arithmetic], sources: Mapping[str, Sequence[str | int]]) -> None:
        self._code, self._sources = code, sources
        self._known: dict[str, tuple[str, ...]] = {}

    def products(self, operand: str) -> tuple[str, ...]:
        """Return the kinds and places of the products from which an operand may come."""
        if operand not in self._known:
            found, seen, waiting = set[str](), set[str | int](), list[str | int](_REGISTER.findall(operand))
            while waiting:
                if (source := waiting.pop()) in seen:
                    continue
                seen.add(source)
                if isinstance(source, str):
                    waiting += self._sources.get(source, ())
                elif (each := self._code[source]).kind.startswith("neg"):
                    waiting += [r for x in each.operands for r in _REGISTER.findall(x)]
                elif each.kind.startswith(_PRODUCTS):
                    found.add(str(each))
            self._known[operand] = tuple(sorted(found))
        return self._known[operand]


def _forms(each: _Arithmetic, sources: _Sources) -> Iterator[str]:
    """Yield the forms in which an addition has its products: ``PLACE fused KIND, PRODUCT`` or ``PLACE plain ...``."""
    if each.kind.startswith("fma"):
        yield f"{each.place} fused {each.kind}, {' or '.join(sources.products(each.operands[2]))}"
    elif each.kind.startswith(("add", "sub")):
        for side, operand in enumerate(each.operands):
            if products := sources.products(operand):
                yield f"{each.place} plain {each.kind}, {side * each.kind.startswith('sub')}: {' or '.join(products)}"


def _product(match: re.Match[str]) -> str:
    """Return a name for the arithmetic of a matrix instruction.

    Products of 16 bits that are added in float32 have the same arithmetic with and without wgmma (Hopper; hardware
    vectors); products of FP8 do not.
    """
    depth, formats = match.groups()
    return f"{depth}.{formats}" if formats else re.sub(r"\.m\d+n\d+", "", match[0])


def _additions(ttgir: str) -> Counter[str]:
    """Return the number of additions and subtractions of floats at each place."""
    where = Locations(ttgir)
    return Counter(where.place(x) for x in ttgir.splitlines() if re.search(r"= arith\.(?:addf|subf) ", x))


def _is_uneven(forms: Mapping[str, int], additions: Mapping[str, int]) -> bool:
    """Return whether one addition of the source has several forms, which differ between elements."""
    by_place = dict[str, dict[str, int]]()
    for form, count in forms.items():
        place, _, rest = form.partition(" ")
        if not rest.startswith("fused") or not rest.endswith(", "):  # further products of a sum have no such sibling
            by_place.setdefault(place, {})[rest] = count
    for place, found in by_place.items():
        if len(found) > 1 and (additions.get(place) == 1 or len(set(found.values())) > 1):
            return True
    return False


def _further(assembled: Callable[[], Sequence[str]]) -> dict[str, str]:
    """Return, for the lines of the source in which ptxas contracts additions, the share of additions that it does not
    contract.
    """
    contracted, plain = map(_added, assembled() or ("", ""))
    shares = dict[str, str]()
    for line in sorted(plain.keys() | contracted.keys()):
        if contracted[line] != plain[line]:
            common = reduce(gcd, (contracted[line], plain[line]))
            shares[line] = f"{contracted[line] // common} of {plain[line] // common}"
    return shares


def _added(sass: str) -> Counter[str]:
    """Return the number of additions in machine code for each line of the source."""
    line, counts = "", Counter[str]()
    for text in sass.splitlines():
        if match := re.search(r'//## File "(?:[^"]*/)?([^"/]*)", line (\d+)', text):
            line = f"{match[1]}:{match[2]}"
        elif re.search(r"\b(?:FADD|HADD2|DADD)\b", text):
            counts[line] += 1
    return counts
