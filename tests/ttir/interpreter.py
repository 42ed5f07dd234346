"""TTIR program by program, each operation alone: what the bits of an imported kernel are held against.

Nothing of the importer but its parser is used; arithmetic that TTIR leaves open is given: of products, exponentials and
row sums.  Nothing is contracted.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim import formats
from npusim.kernels.triton.ttir_text import FORMATS, Op, read, shape_of
from npusim.kernels.triton.values import RELATIONS, float_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_INTEGER = {
    "addi": np.add,
    "subi": np.subtract,
    "muli": np.multiply,
    "minsi": np.minimum,
    "maxsi": np.maximum,
    "andi": np.bitwise_and,
    "ori": np.bitwise_or,
    "xori": np.bitwise_xor,
    "divsi": lambda a, b: (np.sign(a) * (abs(a) // b)).astype(np.int64),
    "remsi": np.fmod,
}
_FLOAT = {"addf": "add", "subf": "sub", "mulf": "mul", "maxnumf": "maximum"}
#: Operations whose result is their operand as it is; integers have 64 bits here.
_PASSING = ("arith.index_cast", "ttg.convert_layout")
_IGNORED = ("llvm.intr.assume", "tt.assert", "gpu.barrier")


class Open(NamedTuple):
    """What TTIR leaves open: names in npusim's registries; ``exp2`` empty: e^(x ln 2)."""

    arithmetic: str
    order: str
    exp: str
    exp2: str
    is_fresh: bool = False
    functions: str = "ascend_c"

    def variant(self, name: str, fmt: str) -> str:
        """Return the variant of a function: CUDA's and Ascend C's of float32, else correct."""
        cuda = {"exp": "libdevice", "log": "libdevice", "log2": "libdevice", "erf": "libdevice", "div": "hopper_full"}
        cuda |= {"sqrt": "hopper_approx", "rsqrt": "hopper_approx"}
        by_name = {"cuda": cuda, "ascend_c": {"erf": "ascend_c"}}.get(self.functions, {})
        return by_name.get(name, "correct") if fmt == "float32" else "correct"


def fmt_of(type_: str) -> str:
    return FORMATS.get(shape_of(type_)[1], "")


class Program:
    """One program of a launch; ``memory`` are flat arrays by argument."""

    def __init__(
        self,
        function: Any,
        arguments: Mapping[str, Any],
        ids: tuple[int, ...],
        memory: Any,
        how: Open,
        grid: tuple[int, ...] = (),
    ) -> None:
        self.memory, self.how, self.ids, self.grid = memory, how, ids, grid
        self.env: dict[str, Any] = {
            n: (n, np.int64(0)) if n in memory else np.float32(a) if isinstance(a, float) else np.int64(a)
            for n, a in arguments.items()
        }
        self.run(function.operations)

    def run(self, operations: list[Op]) -> list[Any]:
        for op in operations:
            family, _, name = op.name.partition(".")
            args = [] if op.name == "scf.for" else [self.env[n] for n in op.operands]
            if op.name in ("scf.yield", "tt.return"):
                return args
            made = getattr(self, f"{family}_{name}", None)
            if made is not None:
                out = made(op, *args)
            elif family == "arith" and name in _INTEGER:
                out = _INTEGER[name](*args)
            elif family == "arith" and name in _FLOAT:
                fmt = fmt_of(op.type)
                out = getattr(formats, _FLOAT[name])(*(formats.cast(np.asarray(a), fmt) for a in args), fmt)
            elif op.name in _PASSING:
                out = args[0]
            elif op.name in _IGNORED:
                out = None
            else:
                raise NotImplementedError(f"{op.line}: {op.text[:80]}")
            if op.results:
                self.env.update(zip(op.results, out if op.name.startswith("scf.") else [out], strict=True))
        return []

    def arith_constant(self, op: Op) -> Any:
        text, _, type_ = op.text.removeprefix("arith.constant ").partition(" : ")
        text = text.removeprefix("dense<").removesuffix(">")
        shape, fmt = shape_of(type_)
        if fmt in FORMATS:
            return formats.cast(np.full(shape, float_of(text, fmt)), FORMATS[fmt])
        return np.full(shape, text == "true" if text in ("true", "false") else int(text))

    def arith_extsi(self, _op: Op, x: Any) -> Any:
        return -np.asarray(x).astype(np.int64) if np.asarray(x).dtype == bool else x

    def arith_extui(self, op: Op, x: Any) -> Any:
        if np.asarray(x).dtype != bool and np.any(np.asarray(x) < 0):
            raise NotImplementedError(f"{op.line}: integers below 0 without a sign")
        return np.asarray(x).astype(np.int64)

    def arith_trunci(self, op: Op, x: Any) -> Any:
        bits = int(shape_of(op.type)[1][1:])
        if bits == 1 or np.any(np.asarray(x) >= 1 << (bits - 1)) or np.any(np.asarray(x) < -1 << (bits - 1)):
            raise NotImplementedError(f"{op.line}: integers beyond {bits} bits")
        return x

    def arith_minnumf(self, op: Op, a: Any, b: Any) -> Any:
        fmt = fmt_of(op.type)
        return -formats.maximum(*(-formats.cast(np.asarray(x), fmt) for x in (a, b)), fmt)

    def arith_negf(self, _op: Op, x: Any) -> Any:
        return -np.asarray(x)

    def math_absf(self, _op: Op, x: Any) -> Any:
        return np.abs(x)

    def tt_get_program_id(self, op: Op) -> Any:
        return np.int64(self.ids["xyz".index(op.text.split()[1])])

    def tt_make_range(self, op: Op) -> Any:
        return np.arange(op.number("start"), op.number("end"))

    def tt_splat(self, op: Op, x: Any) -> Any:
        shape = shape_of(op.type)[0]
        return (x[0], np.broadcast_to(x[1], shape)) if isinstance(x, tuple) else np.broadcast_to(x, shape)

    tt_broadcast = tt_splat

    def tt_expand_dims(self, op: Op, x: Any) -> Any:
        return np.expand_dims(x, op.number("axis"))

    def tt_trans(self, _op: Op, x: Any) -> Any:
        return np.ascontiguousarray(x.T)

    def tt_addptr(self, _op: Op, pointer: Any, offset: Any) -> Any:
        return pointer[0], pointer[1] + offset

    def tt_load(self, op: Op, pointer: Any, mask: Any = None, other: Any = None) -> Any:
        name, at = pointer
        if mask is None:
            return self.memory[name][at]
        values = self.memory[name][np.where(mask, at, 0)]
        return np.where(mask, values, 0 if other is None else other).astype(values.dtype)

    def tt_store(self, _op: Op, pointer: Any, value: Any, mask: Any = None) -> None:
        name, at = pointer
        keep = np.ones(at.shape, bool) if mask is None else np.broadcast_to(mask, at.shape)
        self.memory[name][at[keep]] = value[keep]

    def arith_cmpi(self, op: Op, a: Any, b: Any) -> Any:
        return RELATIONS[op.text.split()[1].rstrip(",")](a - b, 0)

    def arith_cmpf(self, op: Op, a: Any, b: Any) -> Any:
        ordered = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
        relation = op.text.split()[1].rstrip(",")
        if relation != "une" and not (relation.startswith("o") and relation[1:] in ordered):
            raise NotImplementedError(f"{op.line}: {op.text[:80]}")
        return np.not_equal(a, b) if relation == "une" else ordered[relation[1:]](a, b)

    def math_rsqrt(self, op: Op, x: Any) -> Any:
        return formats.rsqrt(np.asarray(x), fmt_of(op.type), variant=self.how.variant("rsqrt", fmt_of(op.type)))

    def arith_select(self, _op: Op, mask: Any, a: Any, b: Any) -> Any:
        return np.where(mask, a, b)

    def arith_truncf(self, op: Op, x: Any) -> Any:
        return formats.cast(np.asarray(x), fmt_of(op.type), overflow="saturate" if "f8" in op.type else None)

    arith_extf = tt_fp_to_fp = arith_truncf

    def arith_sitofp(self, op: Op, x: Any) -> Any:
        return formats.cast(np.asarray(x).astype(np.float64), fmt_of(op.type))

    def math_exp2(self, op: Op, x: Any) -> Any:
        fmt = fmt_of(op.type)
        if self.how.exp2:
            return formats.exp2(x, fmt, variant=self.how.exp2)
        return formats.exp(formats.mul(x, formats.cast(np.log(2.0), fmt), fmt), fmt, variant=self.how.exp)

    def math_exp(self, op: Op, x: Any) -> Any:
        fmt = fmt_of(op.type)
        if self.how.exp2:
            variant = f"{self.how.exp2}_subnormal" if self.how.functions == "cuda" else self.how.exp2
            return formats.exp2(formats.mul(x, formats.cast(np.log2(np.e), fmt), fmt), fmt, variant=variant)
        return formats.exp(x, fmt, variant=self.how.exp)

    def math_erf(self, op: Op, x: Any) -> Any:
        return formats.erf(x, fmt_of(op.type), variant=self.how.variant("erf", fmt_of(op.type)))

    def math_log2(self, op: Op, x: Any) -> Any:
        return formats.log2(np.asarray(x), fmt_of(op.type), variant=self.how.variant("log2", fmt_of(op.type)))

    def math_sqrt(self, op: Op, x: Any) -> Any:
        return formats.sqrt(np.asarray(x), fmt_of(op.type), variant=self.how.variant("sqrt", fmt_of(op.type)))

    def tt_precise_sqrt(self, op: Op, x: Any) -> Any:
        return formats.sqrt(np.asarray(x), fmt_of(op.type))

    def arith_divf(self, op: Op, a: Any, b: Any) -> Any:
        fmt = fmt_of(op.type)
        x, y = (formats.cast(np.asarray(x), fmt) for x in (a, b))
        return formats.div_full(x, y) if self.how.variant("div", fmt) == "hopper_full" else formats.div(x, y, fmt)

    def tt_precise_divf(self, op: Op, a: Any, b: Any) -> Any:
        return formats.div(*(formats.cast(np.asarray(x), fmt_of(op.type)) for x in (a, b)), fmt_of(op.type))

    def tt_extern_elementwise(self, op: Op, x: Any) -> Any:
        assert '"__nv_expf"' in op.text
        if self.how.functions != "cuda":
            return self.math_exp(op, x)
        return formats.exp(x, fmt_of(op.type), variant=self.how.variant("exp", fmt_of(op.type)))

    def tt_get_num_programs(self, op: Op) -> Any:
        return np.int64(self.grid["xyz".index(op.text.split()[1])])

    def tt_reduce(self, op: Op, x: Any) -> Any:
        fmt = fmt_of(op.type) or fmt_of(op.text)
        x = np.ascontiguousarray(np.moveaxis(x, op.number("axis"), -1))
        how = [o.name for o in op.body if o.name != "block"]
        if how[:1] == ["arith.addf"] and len(how) == 2:
            return formats.reduce_sum(x, fmt, self.how.order)
        if how[:1] == ["arith.maxnumf"] and len(how) == 2:
            return formats.reduce_max(x, fmt)
        if how[:1] == ["arith.minnumf"] and len(how) == 2:
            return -formats.reduce_max(-x, fmt)
        raise NotImplementedError(f"{op.line}: a reduction by {', '.join(how)}")

    def tt_dot(self, op: Op, a: Any, b: Any, c: Any) -> Any:
        arithmetic = formats.get_arithmetic(self.how.arithmetic)
        a, b, c = (np.ascontiguousarray(x) for x in (a, b, c))
        if self.how.is_fresh:
            return formats.add(c, formats.matmul(a, b, None, arithmetic=arithmetic), fmt_of(op.type))
        return formats.matmul(a, b, c, arithmetic=arithmetic)

    def scf_if(self, op: Op, condition: Any) -> Any:
        return self.run(op.body if condition else op.otherwise)

    def scf_for(self, op: Op) -> Any:
        number, low, high, step, *carried = op.operands
        state = [self.env[n] for n in carried[1::2]]
        for i in range(int(self.env[low]), int(self.env[high]), int(self.env[step])):
            self.env.update(zip((number, *carried[::2]), (np.int64(i), *state), strict=True))
            state = self.run(op.body)
        return state


def interpret(function: Any, arguments: Mapping[str, Any], grid: tuple[int, ...], memory: Any, how: Open) -> None:
    """Run all programs of a grid on flat arrays; ``function``: TTIR, read or not."""
    function = read(function) if isinstance(function, str) else function
    for ids in itertools.product(*map(range, (*grid, 1, 1)[:3])):
        Program(function, arguments, ids, memory, how, grid)
