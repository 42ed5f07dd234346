"""Parts of kernels: functions and operations that compilers put into them, and the types of their arguments."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.late_methods import dataclass

if TYPE_CHECKING:
    import numpy as np

#: The known type of an argument: a letter, (dtype's letter, dimensions), a `TableKind`, or a tuple of these.
ArgumentType = Any


@dataclass(frozen=True)
class InlinedFunction:
    """A function that kernels call, compiled into each of them; Python cannot call it."""

    function: Callable[..., Any]

    def __call__(self, *_: object) -> Any:
        """Raise `TypeError`."""
        name = self.function.__qualname__
        raise TypeError(f"{name} is compiled into the kernels that call it and cannot be called from Python")


@dataclass(frozen=True)
class Intrinsic:
    """An operation on bits that Python does not have: a cast between types of one size, or ``fma`` of one type."""

    source: str
    target: str


class TableKind(NamedTuple):
    """The type of a `Table`: its name, and each array's name, dtype and dimensions."""

    name: str
    arrays: tuple[tuple[str, np.dtype[Any], int], ...]


def is_array(kind: ArgumentType) -> bool:
    """Return whether an argument's type is that of an array."""
    return isinstance(kind, tuple) and len(kind) == 2 and isinstance(kind[1], int)


def with_globals(function: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a function whose parts and intrinsics are replaced by the results of ``replace``."""
    names = {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}
    used = {n: v for n, v in function.__globals__.items() if n in names}
    others = {n: replace(v) for n, v in used.items() if isinstance(v, InlinedFunction | Intrinsic)}
    kind = type(function)
    copy = kind(
        function.__code__, function.__globals__ | others, function.__name__, function.__defaults__, function.__closure__
    )
    return functools.update_wrapper(copy, function)


@functools.cache
def intrinsic_of(operation: Intrinsic) -> Any:
    """Return a numba intrinsic."""
    from numba import types
    from numba.extending import intrinsic

    target: Any = getattr(types, operation.target)
    if operation.source == "fma":

        @intrinsic
        def fused(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return builder.fma(*args)

            return target(target, target, target), codegen

        return fused
    source: Any = getattr(types, operation.source)

    @intrinsic
    def cast(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), codegen

    return cast
