"""Records the kernels of a TileLang-Ascend program as calls: from its text, without its package and without PyTorch.

TileLang-Ascend needs CANN; a program therefore runs with stand-ins, which compute nothing: tensors of a launch have the
shapes of the kernel's parameters and no values.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from npusim.errors import NpusimError, SpecError
from npusim.kernels.tilelang.ascend_text import kernel_of
from npusim.kernels.tilelang.ascend_values import ALIASES
from npusim.kernels.tilelang.program import (
    REPLACED,
    Language,
    PrimFunc,
    Silent,
    SymbolicSize,
    TensorType,
    load_program,
    place_in,
    stand_ins,
)
from npusim.kernels.tilelang.recording import difference
from npusim.kernels.tilelang.statements import FLOATS, BufferElement, TileBuffer, TileKernel, expressions_in, parts_of
from npusim.kernels.tilelang.ttir_writer import written
from npusim.kernels.triton.calls import Argument, Call, CallConfiguration, Calls
from npusim.kernels.triton.recording import Recorder, recording, replaced

LANGUAGE = "tilelang-ascend"


def is_ascend_program(path: Path) -> bool:
    """Return whether a file, or a module that it imports from its own folder, has a call with ``is_npu=True``."""
    seen, waiting = set[Path](), [path]
    while waiting:
        one = waiting.pop()
        if one in seen or not one.is_file():
            continue
        seen.add(one)
        try:
            nodes = list(ast.walk(ast.parse(one.read_text())))
        except (OSError, SyntaxError, ValueError):
            continue
        keywords = [k for node in nodes if isinstance(node, ast.Call) for k in node.keywords if k.arg == "is_npu"]
        if any(isinstance(k.value, ast.Constant) and k.value.value is True for k in keywords):
            return True
        names = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        waiting += [path.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names]
    return False


def program_call(path: Path, name: str, arguments: Mapping[str, object]) -> Calls:
    """Return the call of the kernel that a file has under a name, or that the function of this name returns.

    Raises `SpecError` if there is no such file or name, if arguments are wrong, or if the program raises an error.
    """
    language = Language()
    kernel = load_program(path, name, arguments, language)
    where, recorder = f"{path}:{kernel.line}", Recorder("", floats=False)
    return Calls([_call_of(kernel, language, {}, where, recorder)])


def launched_calls(path: Path, arguments: Sequence[str], *, hw: str, floats: bool) -> Calls:
    """Return the calls of the kernels that a program launches when it runs as a script.

    ``arguments``: the arguments of the script.  If PyTorch is installed, the program uses it on the CPU; without it,
    tensors have only shapes.  Raises `SpecError` with the line at which the program fails.
    """
    recorder, language = Recorder("", floats=floats), Language()

    @contextmanager
    def of_ascend(of: Recorder) -> Iterator[None]:
        with _torch_with_npu(), stand_ins(path, language, REPLACED[:1] + REPLACED[2:]):
            language.launched = _Launches(of, language, path)
            yield

    with redirect_stdout(sys.stderr):  # text that the program prints is not a result
        if find_spec("torch"):
            with recording(hw=hw, floats=floats, others=[of_ascend]) as calls:
                _run(path, arguments, calls)
            return calls
        with stand_ins(path, language):
            language.launched = _Launches(recorder, language, path)
            _run(path, arguments, recorder.calls)
    return recorder.calls


def _run(path: Path, arguments: Sequence[str], calls: Calls) -> None:
    """Run a program as a script."""
    sys.argv[:] = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise SpecError(f"{path} exits with {error.code} after {len(calls)} calls") from None
    except NpusimError:
        raise
    except Exception as error:
        place = place_in(error, str(path))
        raise SpecError(f"{place}: {type(error).__name__}: {error}, after {len(calls)} calls") from error


@contextmanager
def _torch_with_npu() -> Iterator[None]:
    """Provide a PyTorch whose NPU is the CPU; comparisons of results are skipped, since no results are computed."""
    torch = import_module("torch")
    with (
        replaced(torch.Tensor, npu=lambda x, *_, **__: x),
        replaced(torch.testing, assert_close=lambda *_, **__: None),
        replaced(torch, npu=Silent("torch.npu"), set_default_device=lambda *_: None),
    ):
        yield


class _Launches:
    """Records each launch of a program's kernels."""

    def __init__(self, recorder: Recorder, language: Language, path: Path) -> None:
        self._recorder, self._language, self._path = recorder, language, str(path)

    def __call__(self, kernel: PrimFunc, given: Sequence[object], named: Mapping[str, object]) -> object:
        """Record a launch; return the outputs that it allocates, whose values are not computed."""
        made_here = kernel.output_names | kernel.workspace_names
        names = [n for n in kernel.parameters if n not in made_here]
        names = names if len(names) == len(given) + len(named) else list(kernel.parameters)
        names = [] if kernel.tuned and not given and not named else names  # a tuner's launch
        if len(names) != len(given) + len(named) or any(n not in names for n in named):
            said = f"the launch has {len(given) + len(named)} arguments for the parameters {', '.join(names)}"
            raise SpecError(f"{kernel.path}:{kernel.line}: {kernel.name}: {said}")
        left = iter([n for n in names if n not in named])
        values = {**{next(left): x for x in given}, **named}
        kernel = _sized(kernel, values)
        where = f"{self._path}:{_launching_line(self._path)}"
        call = _call_of(kernel, self._language, values, where, self._recorder)
        self._recorder.calls.append(call)
        outputs = [n for n in kernel.parameters if n in kernel.output_names and n not in values]
        result = [self._allocated(kernel, n) for n in outputs]
        return result[0] if len(result) == 1 else result or None

    def _allocated(self, kernel: PrimFunc, name: str) -> object:
        kind = kernel.function.__annotations__.get(name)
        if not find_spec("torch") or not isinstance(kind, TensorType) or kernel.symbols:
            return Silent(name)
        torch = import_module("torch")
        shape = [kernel.sizes.get(n.name, n) if isinstance(n, SymbolicSize) else n for n in kind.shape]
        return torch.empty(shape, dtype=getattr(torch, ALIASES.get(kind.fmt, kind.fmt), torch.float32))


def _sized(kernel: PrimFunc, values: Mapping[str, object]) -> PrimFunc:
    """Return a kernel with the sizes of ``T.symbolic`` that the tensors of a launch have; all sizes must be known."""
    sizes = dict[str, int]()
    for size, name, axis in kernel.symbols:
        shape = getattr(values.get(name), "shape", None)
        if isinstance(shape, Sequence) and axis < len(shape):
            sizes.setdefault(size, int(shape[axis]))
    if not sizes or sizes.keys() != {size for size, _, _ in kernel.symbols}:
        return kernel
    return kernel.remade(sizes) if kernel.remade is not None else replace(kernel, sizes=sizes)


def _call_of(
    kernel: PrimFunc, language: Language, values: Mapping[str, object], where: str, recorder: Recorder
) -> Call:
    """Return the call of a launch, with the configurations of its tuner; a call that cannot be read states
    the reason.
    """
    given, listed = dict[str, object](), list[CallConfiguration]()
    for one, constants in kernel.tuned or ((kernel, {}),):
        plain = {n: x if isinstance(x, bool | int | float | str | None) else str(x) for n, x in constants.items()}
        try:
            result = kernel_of(one, language)
            if not given:
                given = _arguments(result, values, recorder)
            _refuse_integers(result, given)
            listed.append(
                CallConfiguration(written(result), result.grid, dict(result.options), plain, "", result.notes)
            )
        except NpusimError as error:
            listed.append(CallConfiguration("", (1,), {}, plain, str(error)))
    given = given if any(not c.refused for c in listed) else {}
    return Call(kernel.name, kernel.path, kernel.line, where, given, tuple(listed), language=LANGUAGE)


def _arguments(kernel: TileKernel, values: Mapping[str, object], recorder: Recorder) -> dict[str, object]:
    """Return the arguments of a launch by parameter; tensors without values have only shapes."""
    given = dict[str, object]()
    for p in kernel.parameters:
        name = p.name if isinstance(p, TileBuffer) else p[0]
        value = values.get(name, Silent(name))
        if isinstance(value, Silent) and isinstance(p, TileBuffer):
            given[name] = Argument(p.shape, p.strides, 0, p.fmt, recorder.fresh_storage())
        elif isinstance(value, Silent):
            raise SpecError(f"{kernel.line}: no launch passes the number {name}")
        else:
            given[name] = _in_shape(p, recorder.argument(name, value))
            if why := difference(p, given[name]):
                raise SpecError(f"{kernel.line}: {name}: {why}")
    return given


def _in_shape(p: TileBuffer | tuple[str, str], x: object) -> object:
    """Return a tensor in the shape of its parameter if they differ only in axes of one element: its memory is
    the same.
    """
    if not isinstance(p, TileBuffer) or not isinstance(x, Argument) or x.shape == p.shape:
        return x
    sizes, wanted = ([(n, s) for n, s in zip(of.shape, of.strides, strict=True) if n != 1] for of in (x, p))
    data = x.data if x.data is None else x.data.reshape(p.shape)
    return replace(x, shape=p.shape, strides=p.strides, data=data) if sizes == wanted else x


def _refuse_integers(kernel: TileKernel, given: Mapping[str, object]) -> None:
    """Refuse a kernel that reads a tensor of integers whose values are not known."""
    for e in expressions_in(kernel.body):
        for x in parts_of(e):
            if not isinstance(x, BufferElement) or not x.buffer.is_global or x.buffer.fmt in FLOATS:
                continue
            argument = given[x.buffer.name]
            if isinstance(argument, Argument) and argument.data is None:
                said = f"{kernel.name} reads integers of {x.buffer.name}, on which its computation depends"
                raise SpecError(f"{kernel.line}: {said}; npusim records them only when the program runs with PyTorch")


def _launching_line(path: str) -> int:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_lineno if frame is not None else 0
