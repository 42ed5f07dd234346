"""Loads the file of a TileLang program with stand-ins for TileLang and PyTorch, and returns its ``T.prim_func``."""

from __future__ import annotations

import ast
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import cast

from npusim.errors import SpecError, absent
from npusim.kernels.tilelang.lengths import Growing
from npusim.kernels.tilelang.tiles import WIDTHS

#: Packages that a stand-in replaces while a program's file is loaded, so that the file computes nothing.
REPLACED = ("tilelang", "torch", "torch_npu")


class Silent:
    """A stand-in for the objects that the program around a kernel uses; calls and attributes of it have no effect."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Silent(f"{self._name}.{name}")

    def __call__(self, *arguments: object, **_: object) -> object:  # noqa: D102  # as a decorator, or as a function
        return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], FunctionType) else Silent(self._name)

    def _combined(self, *_: object) -> Silent:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __pow__ = _combined
    __neg__ = __getitem__ = __lt__ = __gt__ = _combined

    def __iter__(self) -> Iterator[Silent]:
        return iter(())

    def __repr__(self) -> str:
        return self._name


class SymbolicSize(Silent):
    """A size that the tensors of a launch have (``T.symbolic``), or an expression of sizes, whose name is empty.

    The function around a kernel computes with such an object, so that the kernel's tensors have shapes that depend on
    it; the function's result is read only after it has run again with the numbers of a launch.  ``refuses``: whether
    the object belongs to a kernel that is being read, for which numbers are known.
    """

    def __init__(self, name: str, refuses: Callable[[], bool]) -> None:
        super().__init__(name)
        self.name, self._refuses = name, refuses

    def _of_sizes(self, *_: object) -> SymbolicSize:
        return SymbolicSize("", self._refuses)

    def _answer(self, *_: object) -> bool:
        self._known()
        return True

    def _known(self) -> int:
        if self._refuses():
            raise SpecError("T.symbolic: no tensor of the launch has this size; set it with -a NAME=VALUE")
        return 1

    def __eq__(self, other: object) -> bool:
        return self._answer()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _of_sizes
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = __pow__ = _of_sizes
    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __bool__ = _answer  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __int__(self) -> int:
        return self._known()

    __index__ = __int__


class Format(str):
    """The name of a format; a call of it converts a scalar."""

    __slots__ = ()

    def __call__(self, value: object) -> object:
        """Return a scalar unchanged."""
        return value

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 8 * WIDTHS[self]


@dataclass(frozen=True, slots=True)
class TensorType:
    """The annotation of a parameter: ``T.Tensor(shape, dtype)``."""

    shape: tuple[int, ...]
    fmt: str


@dataclass(frozen=True, slots=True)
class PrimFunc:
    """A ``T.prim_func``: the function; pass configurations, numbers of outputs and workspaces of its ``tilelang.jit``.

    ``launched``: called with the kernel and the arguments of a launch.  ``remade``: returns the kernel with numbers in
    place of sizes of ``T.symbolic``.  ``tuned``: the kernels of a tuner's configurations, with their constants.
    ``sizes``: the numbers of ``T.symbolic``.
    """

    function: FunctionType
    configurations: Mapping[str, object]
    outputs: tuple[int, ...] = ()
    workspaces: tuple[int, ...] = ()
    launched: Callable[[PrimFunc, Sequence[object], Mapping[str, object]], object] | None = None
    remade: Callable[[Mapping[str, int]], PrimFunc] | None = None
    tuned: tuple[tuple[PrimFunc, Mapping[str, object]], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def symbols(self) -> tuple[tuple[str, str, int], ...]:
        """The sizes of ``T.symbolic`` without a number, each with a parameter and the parameter's axis that has this
        size.
        """
        kinds = self.function.__annotations__.items()
        shapes = [(name, kind.shape) for name, kind in kinds if isinstance(kind, TensorType)]
        pairs: list[tuple[object, str, int]] = [(n, name, i) for name, shape in shapes for i, n in enumerate(shape)]
        found = [(n.name, name, i) for n, name, i in pairs if isinstance(n, SymbolicSize)]
        return tuple(x for x in found if x[0] and x[0] not in self.sizes)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return self.function.__code__.co_varnames[: self.function.__code__.co_argcount]

    @property
    def output_names(self) -> set[str]:
        """The names of the outputs, which a launch allocates."""
        return {self.parameters[i] for i in self.outputs}

    @property
    def workspace_names(self) -> set[str]:
        """The names of the workspaces, which a launch allocates and which nothing reads after the launch."""
        return {self.parameters[i] for i in self.workspaces}

    @property
    def path(self) -> str:
        """The file that contains the function."""
        return self.function.__code__.co_filename

    @property
    def line(self) -> int:
        """The line of the function."""
        return self.function.__code__.co_firstlineno

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    def __call__(self, *given: object, **named: object) -> object:
        """Return a stand-in of the result of a launch, which computes nothing."""
        if self.launched is None:
            return Silent(self.name)
        return self.launched(self, given, named)

    def __getattr__(self, name: str) -> Silent:  # attributes of a compiled kernel
        if name.startswith("__"):
            raise AttributeError(name)
        return Silent(name)


class Language(ModuleType):
    """``tilelang.language``: ``words`` has the functions of the kernel that is being read, if any.

    ``launched``: called when the program launches a kernel (`PrimFunc`).  ``sizes``: known sizes of ``T.symbolic``, by
    name; ``asked``: the names that the program requests.
    """

    asked: dict[str, None]

    launched: Callable[[PrimFunc, Sequence[object], Mapping[str, object]], object] | None = None

    def __init__(self) -> None:
        super().__init__("tilelang.language")
        self.__dict__["words"] = None
        self.__dict__["__path__"] = []
        self.__dict__["sizes"] = dict[str, int]()
        self.__dict__["asked"] = dict[str, None]()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in WIDTHS:
            return Format(name)
        if name in ("Tensor", "Buffer"):
            return _tensor_type
        if name == "prim_func":
            return lambda function: PrimFunc(function, {}, (), (), self.launched)
        if name == "macro":
            return _macro
        if name in ("symbolic", "dynamic"):
            return self.size
        words: Callable[[str], object] | None = self.__dict__["words"]
        if words is not None:
            return words(name)
        if name in PLAIN:
            return PLAIN[name]
        return Silent(f"T.{name}")

    def size(self, name: str, *_: object) -> int | SymbolicSize:
        """Return a size that the tensors of a launch have: its number, if it is known."""
        known: Mapping[str, int] = self.__dict__["sizes"]
        self.asked[name] = None
        return known[name] if name in known else SymbolicSize(name, lambda: self.__dict__["words"] is not None)

    @contextmanager
    def sized(self, sizes: Mapping[str, int]) -> Iterator[None]:
        """Set sizes of ``T.symbolic`` while a program creates a kernel."""
        before = self.__dict__["sizes"]
        self.__dict__["sizes"] = {**before, **sizes}
        try:
            yield
        finally:
            self.__dict__["sizes"] = before

    @contextmanager
    def walking(self, words: Callable[[str], object]) -> Iterator[None]:
        """Provide the words of a walk while the kernel runs."""
        self.__dict__["words"] = words
        try:
            yield
        finally:
            self.__dict__["words"] = None


def ceildiv(a: int, b: int) -> int:
    """Return a quotient rounded up."""
    return -(-a // b)


_MATH: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {"next_power_of_2": lambda n: 1 << (int(n) - 1).bit_length()}
)


#: Words that also have a meaning outside a kernel.
PLAIN: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "ceildiv": ceildiv,
        "if_then_else": lambda condition, a, b: a if condition else b,
        "infinity": lambda _fmt: float("inf"),
        "min": min,
        "max": max,
        "And": lambda a, b: bool(a) and bool(b),
        "Or": lambda a, b: bool(a) or bool(b),
        "Not": lambda a: not a,
    }
)


def _tensor_type(shape: Sequence[int] | int, dtype: object = "float32", *_: object, **__: object) -> TensorType:
    return TensorType(tuple(shape) if isinstance(shape, Sequence) else (shape,), str(dtype))


def _macro(function: FunctionType) -> FunctionType:
    """Mark a function whose statements belong to the kernel that calls it."""
    function.__dict__["is_macro"] = True
    return function


def _jit(language: Language, *arguments: object, **options: object) -> object:
    """Return the stand-in of ``tilelang.jit``: a function whose kernels have its pass configurations and outputs."""

    def decorated(function: Callable[..., object]) -> Callable[..., object]:
        if isinstance(function, PrimFunc):
            return _configured(function, options)  # type: ignore[return-value]  # `tilelang.jit` of a kernel

        def called(*values: object, **named: object) -> object:
            def remade(sizes: Mapping[str, int]) -> PrimFunc:
                with language.sized(sizes):
                    again = _configured(function(*values, **named), options)
                assert isinstance(again, PrimFunc)
                return replace(again, sizes=sizes)

            result = _configured(function(*values, **named), options)
            return replace(result, remade=remade) if isinstance(result, PrimFunc) and result.symbols else result

        called.__dict__["__wrapped__"] = function
        called.__dict__["__jit_impl__"] = SimpleNamespace(target=str(options.get("target", "auto")))
        return called

    return decorated(arguments[0]) if arguments and callable(arguments[0]) else decorated


def _configured(kernel: object, options: Mapping[str, object]) -> object:
    """Return a kernel with the pass configurations and outputs that its compilation states."""
    if not isinstance(kernel, PrimFunc):
        return kernel
    passes, count = options.get("pass_configs"), len(kernel.parameters)
    if isinstance(passes, Mapping) and passes:
        kernel = replace(kernel, configurations={str(k).rpartition(".")[2]: v for k, v in passes.items()})
    if outputs := _numbers(options.get("out_idx"), count):
        kernel = replace(kernel, outputs=outputs)
    workspaces = _numbers(options.get("workspace_idx"), count)
    return replace(kernel, workspaces=workspaces) if workspaces else kernel


def _numbers(given: object, count: int) -> tuple[int, ...]:
    """Return numbers of parameters, some of which may be counted from the last one."""
    listed = [given] if isinstance(given, int) else given if isinstance(given, list | tuple) else []
    return tuple(i % count for i in listed if isinstance(i, int))


class _StandIns(MetaPathFinder, Loader):
    """Finds every module of the replaced packages."""

    def __init__(self, language: Language, packages: Sequence[str]) -> None:
        self.language, self.packages = language, packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a module of a replaced package, None for others."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in of a module."""
        if spec.name == "tilelang.language":
            return self.language
        module = ModuleType(spec.name)
        module.__dict__["__getattr__"] = lambda name: _asked(spec.name, name)
        if spec.name == "tilelang":
            jitted = {"jit": partial(_jit, self.language), "compile": lambda kernel, *_, **k: _configured(kernel, k)}
            tuned, plain = partial(_autotune, self.language), {"cdiv": ceildiv, "math": SimpleNamespace(**_MATH)}
            module.__dict__.update(jitted, language=self.language, DataType=Format, autotune=tuned, **plain)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the stand-in is complete."""


def _made_configs(configs: object, values: Sequence[object], named: Mapping[str, object]) -> object:
    """Return the result of a function of configurations for a kernel's arguments, passed separately or as a tuple and a
    mapping.
    """
    assert callable(configs)
    parameters = inspect.signature(configs)
    try:
        parameters.bind(*values, **named)
    except TypeError:
        return configs(tuple(values), dict(named)) if parameters.parameters else configs()
    return configs(*values, **named)


def _autotune(language: Language, *arguments: object, configs: object = None, **_: object) -> object:
    """Return the stand-in of ``tilelang.autotune``: a function that makes the kernels of all configurations.

    As in TileLang, it creates only one kernel if the program sets a parameter that configurations have.
    """

    def decorated(function: Callable[..., object]) -> Callable[..., object]:
        def called(*values: object, **named: object) -> object:
            is_made = callable(configs) and not isinstance(configs, Silent)
            listed = _made_configs(configs, values, named) if is_made else configs
            order = list(inspect.signature(inspect.unwrap(function)).parameters)
            own = [dict(c) for c in listed] if isinstance(listed, list | tuple) else []
            if not own or any(n in named or (n in order and order.index(n) < len(values)) for n in own[0]):
                return function(*values, **named)
            result = [(function(*values, **{**named, **config}), config) for config in own]
            kernels = tuple((kernel, config) for kernel, config in result if isinstance(kernel, PrimFunc))
            if len(kernels) < len(result):
                return result[0][0]
            first = replace(kernels[0][0], tuned=kernels)
            if language.launched is not None:  # in the form in which a tuner launches them
                language.launched(first, (), {})
            return first

        called.__dict__["__wrapped__"] = function
        return called

    return decorated(arguments[0]) if arguments and callable(arguments[0]) else decorated


def _asked(module: str, name: str) -> Silent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Silent(f"{module}.{name}")


@contextmanager
def stand_ins(path: Path, language: Language, packages: Sequence[str] = REPLACED) -> Iterator[None]:
    """Provide stand-ins for the replaced packages, and add the folder of a program to the import path, as Python does
    for a script.
    """
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in packages}
    finder, argv, search = _StandIns(language, packages), sys.argv, list(sys.path)
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    sys.argv, sys.path[:] = [str(path)], [str(path.resolve().parent), *search]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
            del sys.modules[name]
        sys.modules.update(before)
        sys.argv, sys.path[:] = argv, search


def place_in(error: BaseException, path: str) -> str:
    """Return ``path:line`` of an error's last traceback entry in a file; only the path if there is no such entry."""
    place, at = path, error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == path:
            place = f"{path}:{at.tb_lineno}"
        at = at.tb_next
    return place


def load_program(path: Path, name: str, arguments: Mapping[str, object], language: Language) -> PrimFunc:
    """Return the kernel that a file has under a name, or that the function of this name returns for arguments.

    The file runs once as a module (``if __name__ == "__main__"`` is not entered).  Raises `SpecError` if there is no
    such file or name, if arguments are missing or unknown, or if the program raises an error.
    """
    if not path.is_file():
        raise SpecError(f"{path}: {absent(path)}; a program is FILE.py::program")
    with stand_ins(path, language), redirect_stdout(sys.stderr):  # text that the program prints is not a result
        try:
            names = runpy.run_path(str(path), run_name="npusim_checked")
            result = names.get(name)
            if callable(result) and not isinstance(result, PrimFunc):
                result = _called(path, name, result, arguments, language)
        except SpecError:
            raise
        except Exception as error:
            raise SpecError(f"{place_in(error, str(path))}: {type(error).__name__}: {error}") from error
    if not isinstance(result, PrimFunc):
        offered = [n for n, x in names.items() if isinstance(x, PrimFunc) or inspect.isfunction(x)]
        listed = ", ".join(n for n in offered if not n.startswith("_"))
        raise SpecError(
            f"{path}: {name!r} is not a T.prim_func and returns none; the file's functions: {listed or 'none'}"
        )
    return result


def _called(
    path: Path, name: str, function: Callable[..., object], arguments: Mapping[str, object], language: Language
) -> object:
    """Return the result of a function; arguments that the function does not have are sizes of ``T.symbolic``."""
    parameters = inspect.signature(function).parameters
    own, sizes = ({n: x for n, x in arguments.items() if (n in parameters) is of} for of in (True, False))
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in own]
    if missing := [n for n in missing if parameters[n].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD,)]:
        given = " ".join(f"-a {n}=..." for n in missing)
        raise SpecError(f"{path}::{name}: {', '.join(missing)} needed: {given}")
    positive = {n: x for n, x in sizes.items() if isinstance(x, int | Growing) and not isinstance(x, bool) and x > 0}
    numbers = cast("dict[str, int]", positive)  # an integer that grows is computed like other integers
    with language.sized(numbers):
        result = function(**own)
    if unknown := [n for n in sizes if n not in numbers or n not in language.asked]:
        listed = ", ".join([*parameters, *(n for n in language.asked if n not in parameters)]) or "none"
        raise SpecError(f"{path}::{name}: there is no argument {', '.join(unknown)}; allowed: {listed}")
    return replace(result, sizes=numbers) if isinstance(result, PrimFunc) else result


def argument_values(texts: Sequence[str]) -> dict[str, object]:
    """Return arguments written ``name=value``; a value that is not a Python literal is a text.

    >>> argument_values(["seq=2048", "dtype=float16"])
    {'seq': 2048, 'dtype': 'float16'}
    """
    values = dict[str, object]()
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise SpecError(f"-a {text}: write NAME=VALUE, for example seq=2048")
        if name in values:
            raise SpecError(f"-a {text}: {name} is given twice")
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
    return values
