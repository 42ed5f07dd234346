"""Records the launches of TileLang kernels in addition to Triton's, on the CPU and without an edit of the program.

TileLang's parser runs unchanged; a stand-in replaces its compiler, so that a launch is written as TTIR and recorded
instead of executed.  Kernels under ``@tilelang.autotune`` are one call with all their configurations.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

from npusim.errors import NpusimError, SpecError
from npusim.kernels.tilelang.prim_func import first_line, kernels_of, name_of, parameters_of, sizes_of
from npusim.kernels.tilelang.statements import TYPES, TileBuffer, TileKernel
from npusim.kernels.tilelang.ttir_writer import written_with_notes
from npusim.kernels.triton.calls import Argument, Call, CallConfiguration, Calls
from npusim.kernels.triton.recording import Recorder, UnreadFormatError, as_method, launching_line, recording, replaced

if TYPE_CHECKING:
    import torch
    from tvm import tirx

#: The package, and the message for a program without it.
PACKAGE = "tilelang"
MISSING = 'TileLang is not installed, and the kernels need its parser: pip install "npusim[tilelang]"'
_SECONDS = 1.0  # seconds of each measurement: all equal


@contextlib.contextmanager
def record(*, hw: str = "h200", floats: bool = False) -> Iterator[Calls]:
    """Record the launches of Triton and TileLang kernels inside a ``with`` block, without a GPU.

    Yields a list (`Calls`) to which launches are added in their order; each replaces a schedule's name in `run`,
    `explore`, `compare` and the other verbs, and ``calls.save("calls.npz")`` writes all to a file.

    hw
        The GPU that the program detects: number of multiprocessors, memory, compute capability (9.0 at least;
        predictions for every other device start from this TTIR).
    floats
        Whether values of floating-point tensors are recorded too; values of integers always are.

    Tensors may be PyTorch's (on the CPU; ``device="cuda"`` means the CPU) or NumPy's arrays.  Kernels do not run and
    their outputs do not change: a launch whose grid or integers an earlier kernel computes is recorded with other
    values.  Raises `SpecError` if neither Triton nor TileLang is installed, if the release of Triton is untested, if
    ``hw`` is not such a GPU, or if Triton's interpreter is on.

    Examples
    --------
    >>> with record() as calls:
    ...     pass
    >>> list(calls)
    []
    """
    others = [_of_tilelang] if find_spec(PACKAGE) else []
    with recording(hw=hw, floats=floats, others=others) as calls:
        yield calls


@contextlib.contextmanager
def _of_tilelang(recorder: Recorder) -> Iterator[None]:
    """Record launches of TileLang's kernels, from the moment at which a program imports the package."""
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(_replaced_compiler(recorder))

        if PACKAGE in sys.modules:
            begin()
            yield
            return
        finder = _WhenImported(begin)
        sys.meta_path.insert(0, finder)
        stack.callback(finder.remove)
        yield


class _WhenImported(MetaPathFinder):
    """Calls a function as soon as TileLang has been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def remove(self) -> None:
        """Stop watching imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != PACKAGE:
            return None
        self.remove()
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self._then()

        setattr(spec.loader, "exec_module", executed)  # noqa: B010 - of this loader alone
        return spec


@contextlib.contextmanager
def _replaced_compiler(recorder: Recorder) -> Iterator[None]:
    """Replace TileLang's compiler, tuner and clock."""
    package, jit, tuner = (import_module(n) for n in (PACKAGE, "tilelang.jit", "tilelang.autotuner.tuner"))
    profiler, bench = import_module("tilelang.profiler"), import_module("tilelang.profiler.bench")

    def compiled(func: tirx.PrimFunc, out_idx: object = None, **options: object) -> RecordedKernel:
        return RecordedKernel(recorder, (_variant(func, out_idx, options.get("pass_configs"), {}),))

    def tuned(of: SimpleNamespace, *_: object, **__: object) -> SimpleNamespace:
        return _tuned(recorder, of)

    def measured(function: Callable[[], object], *_: object, **__: object) -> float:
        function()
        return _SECONDS

    with contextlib.ExitStack() as stack:
        for owner in (jit.JITImpl, tuner.AutoTuneImpl):
            stack.enter_context(_with_own_caches(owner))
        stack.enter_context(replaced(jit, compile=compiled))
        stack.enter_context(replaced(package, compile=compiled))
        stack.enter_context(replaced(tuner.AutoTuner, run=as_method(tuned)))
        for module in (profiler, bench):
            stack.enter_context(replaced(module, do_bench=measured))
        yield


@contextlib.contextmanager
def _with_own_caches(owner: type) -> Iterator[None]:
    """Let decorated functions forget the kernels that they created before and, at the end, those that they
    create here.
    """
    call, called = owner.__call__, dict[int, object]()

    def fresh(of: object, *arguments: object, **named: object) -> object:
        if id(of) not in called:
            _forget(of)
        called[id(of)] = of
        return call(of, *arguments, **named)

    try:
        with replaced(owner, __call__=fresh):
            yield
    finally:
        for of in called.values():
            _forget(of)


def _forget(of: object) -> None:
    for name in ("_kernel_cache", "_call_form_cache", "_tuner_cache"):
        if (cache := getattr(of, name, None)) is not None:
            cache.clear()


@dataclass(frozen=True)
class _Variant:
    """A PrimFunc with its outputs by number, its pass configurations, and its configuration by a tuner.

    ``refused``: the reason why the parser creates no kernel.
    """

    function: tirx.PrimFunc | None
    outputs: tuple[int, ...]
    configurations: Mapping[str, object]
    constants: Mapping[str, bool | int | float | str | None]
    refused: str = ""


def _variant(
    function: tirx.PrimFunc, out_idx: object, configurations: object, constants: Mapping[str, object]
) -> _Variant:
    """Return a PrimFunc with the settings of its decorator and of its attributes."""
    attributes = dict(function.attrs) if function.attrs else {}
    own = [int(i) for i in attributes.get("tilelang_out_idx", ())]
    said = [out_idx] if isinstance(out_idx, int) else list(out_idx) if isinstance(out_idx, list | tuple) else own
    passes = {str(k): x for k, x in dict(attributes.get("tilelang_pass_configs", {})).items()}
    passes |= {str(getattr(k, "value", k)): x for k, x in dict(configurations or {}).items()}  # type: ignore[call-overload]
    outputs = tuple(int(i) % len(function.params) for i in said)
    plain = {n: x if isinstance(x, bool | int | float | str | None) else str(x) for n, x in constants.items()}
    return _Variant(function, outputs, MappingProxyType(passes), MappingProxyType(plain))


def _tuned(recorder: Recorder, tuner: SimpleNamespace) -> SimpleNamespace:
    """Return a tuner's result: its configurations as variants of one kernel; nothing is measured."""
    if callable(tuner.configs):
        arguments, named = tuner._kernel_parameters
        tuner.configs = tuner.configs(*arguments, **dict(named))
    if _is_chosen(tuner):
        kernel = tuner.jit_compile()
        return SimpleNamespace(kernel=kernel, func=kernel.prim_func, config=None, latency=None, ref_latency=None)
    elaborate, options, variants = tuner.jit_elaborate or tuner.fn, tuner.compile_args, list[_Variant]()
    for config in tuner.configs:
        own = {n: x for n, x in config.items() if n != "pass_configs"}
        passes = {**(options.pass_configs or {}), **(config.get("pass_configs") or {})}
        try:
            variants.append(_variant(elaborate(**own), options.out_idx, passes, own))
        except Exception as error:  # noqa: BLE001 - whatever the parser says of a configuration
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            constants = {n: x for n, x in own.items() if isinstance(x, bool | int | float | str | None)}
            variants.append(_Variant(None, (), {}, constants, said))
    if not any(v.function is not None for v in variants):
        why = variants[0].refused if variants else "it has none"
        raise SpecError(f"tilelang.autotune: npusim cannot read its configurations ({why})")
    kernel, (config, *_) = RecordedKernel(recorder, tuple(variants)), tuner.configs
    known = {"config": dict(config), "latency": _SECONDS, "ref_latency": _SECONDS, "libcode": ""}
    return SimpleNamespace(kernel=kernel, func=kernel.prim_func, **known)


def _is_chosen(tuner: SimpleNamespace) -> bool:
    """Return whether the program sets a parameter that configurations have: TileLang then tunes nothing."""
    if tuner._kernel_parameters is None or not tuner.configs:
        return False
    (arguments, named), order = tuner._kernel_parameters, list(tuner._function_parameters)
    tuned = [n for n in tuner.configs[0] if n != "pass_configs"]
    return any(n in tuned for n, _ in named) or any(order.index(n) < len(arguments) for n in tuned)


class RecordedKernel:
    """A stand-in for a compiled kernel: a call of it records a launch and returns outputs without computed values."""

    latency = ref_latency = _SECONDS

    def __init__(self, recorder: Recorder, variants: tuple[_Variant, ...]) -> None:
        self._recorder, self._variants = recorder, variants
        first = next(v for v in variants if v.function is not None)
        self.prim_func: tirx.PrimFunc = first.function
        self._outputs = first.outputs
        self.out_idx, self.config = list(first.outputs), dict(first.constants)
        self._was_launched = False

    def __call__(self, *arguments: torch.Tensor, **named: torch.Tensor) -> object:
        """Record a launch; return the outputs that TileLang allocates, one or a list."""
        arguments = (*arguments, *self._in_order(len(arguments), named))
        given = [i for i in range(len(self.prim_func.params)) if i not in self._outputs]
        if len(arguments) == len(self.prim_func.params):  # the arguments include outputs, as a tuner passes them
            given = list(range(len(arguments)))
        if len(arguments) != len(given):
            raise SpecError(
                f"{name_of(self.prim_func)}: the launch has {len(arguments)} arguments for {len(given)} parameters"
            )
        by_number = dict(zip(given, arguments, strict=True))
        sizes = sizes_of(self.prim_func, {i: getattr(x, "shape", x) for i, x in by_number.items()})
        try:
            parameters = parameters_of(self.prim_func, sizes)
        except NpusimError as error:  # a format that is not read
            self._add_refused(str(error))
            return self._unread_outputs(by_number)
        result = [_empty(parameters[i]) for i in self._outputs if i not in by_number]
        by_number |= dict(zip((i for i in self._outputs if i not in by_number), result, strict=True))
        self._add([by_number[i] for i in range(len(parameters))], parameters, sizes)
        return result[0] if len(result) == 1 else result or None

    def _in_order(self, count: int, named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return arguments that are given by name in the order of the parameters after the first ``count``."""
        function = self.prim_func
        names = [str(function.buffer_map.get(p, p).name) for p in function.params]
        outputs = {names[i] for i in self._outputs}
        inputs = names if outputs & named.keys() else [n for n in names if n not in outputs]
        if wrong := [n for n in named if n not in inputs[count:]]:
            why = f"{name_of(function)}: {wrong[0]} cannot be passed by name"
            raise SpecError(f"{why}; allowed: {', '.join(inputs[count:]) or 'none'}")
        return [named[n] for n in inputs[count:] if n in named]

    def _add_refused(self, why: str) -> None:
        """Add a launch that cannot be read, without arguments."""
        self._was_launched = True
        listed = [CallConfiguration("", (1,), {}, v.constants, v.refused or why) for v in self._variants]
        line = first_line(self.prim_func)
        called = name_of(self.prim_func), line.file, line.number, launching_line()
        self._recorder.calls.append(Call(*called, {}, tuple(listed), language=f"{PACKAGE} {version(PACKAGE)}"))

    def _unread_outputs(self, given: Mapping[int, torch.Tensor]) -> object:
        """Return the outputs of a launch that is not read, with the right shapes and, if PyTorch has them, the right
        formats.
        """
        torch, result = import_module("torch"), list[object]()
        for i in (i for i in self._outputs if i not in given):
            buffer = self.prim_func.buffer_map[self.prim_func.params[i]]
            shape = [int(n) if type(n).__name__ == "IntImm" else 1 for n in buffer.shape]
            result.append(torch.empty(shape, dtype=getattr(torch, str(buffer.dtype), torch.uint8)))
        return result[0] if len(result) == 1 else result or None

    def _add(
        self,
        values: Sequence[torch.Tensor | float],
        parameters: Sequence[TileBuffer | tuple[str, str]],
        sizes: Mapping[str, int],
    ) -> None:
        self._was_launched = True
        arguments = dict[str, object]()
        for p, x in zip(parameters, values, strict=True):
            name = p.name if isinstance(p, TileBuffer) else p[0]
            try:
                arguments[name] = self._recorder.argument(name, x)
            except UnreadFormatError as error:
                self._add_refused(str(error))
                return
            if why := difference(p, arguments[name]):
                raise SpecError(f"{name_of(self.prim_func)}: {name}: {why}")
        kernels = [_read(v, sizes) for v in self._variants]
        result = next((k for k in kernels if not isinstance(k, str)), None)
        for name, scratch in (
            (b.name, b) for kernel in result or () for b in kernel.parameters if isinstance(b, TileBuffer)
        ):
            if name not in arguments:
                arguments[name] = self._recorder.argument(name, _empty(scratch))
        for number, kernel in enumerate(result or [None]):
            listed = [_configuration(v, k, number) for v, k in zip(self._variants, kernels, strict=True)]
            given = arguments
            if kernel is not None:
                given = {
                    n: arguments[n] for p in kernel.parameters for n in [p.name if isinstance(p, TileBuffer) else p[0]]
                }
            line = kernel.line if kernel is not None else first_line(self.prim_func)
            name = kernel.name if kernel is not None else name_of(self.prim_func)
            called = name, line.file, line.number, launching_line()
            language = f"{PACKAGE} {version(PACKAGE)}"
            self._recorder.calls.append(Call(*called, given, tuple(listed), language=language))

    def get_profiler(self, *_: object, **__: object) -> _Clock:
        """Return a clock that launches the kernel once, unless the program has launched it."""
        return _Clock(self)

    def launch_once(self) -> None:
        """Record a launch on tensors that npusim creates, if the program itself launches nothing."""
        if not self._was_launched:
            try:
                parameters = parameters_of(self.prim_func, {})
            except NpusimError as error:  # a format that is not read
                self._add_refused(str(error))
                return
            self._add([_empty(p) for p in parameters], parameters, {})

    def get_kernel_source(self, *_: object, **__: object) -> str:
        """Return a comment, because no compiler has compiled code."""
        return f"// npusim has recorded {name_of(self.prim_func)}; it generates no code"


class _Clock:
    """A stand-in for TileLang's profiler: it measures and compares nothing."""

    def __init__(self, kernel: RecordedKernel) -> None:
        self.func = kernel
        self._kernel = kernel

    def do_bench(self, function: Callable[[], object] | None = None, *_: object, **__: object) -> float:
        """Launch the kernel once, unless the program has launched it, and return one millisecond."""
        self._kernel.launch_once()
        return _SECONDS

    def assert_allclose(self, *_: object, **__: object) -> None:
        """Compare nothing: no output is computed."""
        self._kernel.launch_once()

    manual_assert_close = assert_consistent = run_once = assert_allclose


def _read(variant: _Variant, sizes: Mapping[str, int]) -> list[TileKernel] | str:
    """Return the kernels of a variant, or the reason why it is refused."""
    if variant.function is None:
        return variant.refused
    try:
        return kernels_of(variant.function, variant.configurations, sizes)
    except NpusimError as error:
        return str(error)


def _configuration(variant: _Variant, kernels: list[TileKernel] | str, number: int) -> CallConfiguration:
    """Return the record of one launch of a variant."""
    constants = variant.constants
    if not isinstance(kernels, str) and number >= len(kernels):
        kernels = f"this configuration has {len(kernels)} launches, and the first configuration has more"
    if isinstance(kernels, str):
        return CallConfiguration("", (1,), {}, constants, kernels)
    kernel = kernels[number]
    try:
        text, notes = written_with_notes(kernel)
        return CallConfiguration(text, kernel.grid, dict(kernel.options), constants, "", notes)
    except NpusimError as error:
        return CallConfiguration("", (1,), {}, constants, str(error))


def _empty(p: TileBuffer | tuple[str, str]) -> torch.Tensor | int:
    """Return a tensor as TileLang allocates an output, or 0 for a number."""
    torch = import_module("torch")
    if not isinstance(p, TileBuffer):
        return 0
    fmt = {"float8_e4m3": "float8_e4m3fn"}.get(p.fmt, p.fmt)
    return torch.empty(p.shape, dtype=getattr(torch, fmt))


def difference(p: TileBuffer | tuple[str, str], x: object) -> str:
    """Return how an argument differs from its parameter; empty if it does not differ."""
    if not isinstance(p, TileBuffer):
        return "must be a number" if isinstance(x, Argument) else ""
    if not isinstance(x, Argument):
        return f"a tensor is needed, got {x!r}"
    if TYPES.get(x.fmt) != TYPES[p.fmt]:
        return f"a tensor of {x.fmt}; the kernel needs {p.fmt}"
    if x.shape != p.shape:
        return f"a tensor of shape {list(x.shape)}; the kernel needs {list(p.shape)}"
    pairs = zip(x.shape, x.strides, p.strides, strict=True)
    return "" if all(a == b for n, a, b in pairs if n > 1) else f"strides {x.strides}; the kernel needs {p.strides}"
