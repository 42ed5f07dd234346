"""Records the launches of Triton kernels that a program makes, on the CPU and without an edit of the program.

Inside `record` nothing runs on a GPU: a stand-in replaces Triton's driver, ``device="cuda"`` is the CPU, and a launch
is recorded instead of executed.  Outputs of the kernels do not change.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.config.load import load_device
from npusim.errors import NpusimError, SpecError
from npusim.formats.float_format import format_of_dtype
from npusim.kernels.triton.calls import INTEGERS, MOST_PROGRAMS, Argument, Call, CallConfiguration, Calls
from npusim.kernels.triton.compiler import (
    OPTIONS,
    compiled_options,
    compiled_text,
    gpu_target,
    kinds_of,
    place_of,
    refused_option,
    ttir_of,
)
from npusim.kernels.triton.live_tensors import UnreadAddressError, with_other_formats, with_tensors
from npusim.kernels.triton.releases import release
from npusim.kernels.triton.ttir_text import read, shape_of
from npusim.machines.sm.core import code_architecture, shared_memory_bytes, warp_issue

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec

#: Packages whose frames are between a program's launch and the function that records it.
_LANGUAGES = ("npusim.kernels.", "triton.runtime", "tilelang")
#: Number of lanes of a warp on every GPU of NVIDIA's (CUDA C++ Programming Guide).
WARP = 32


@contextlib.contextmanager
def recording(
    *, hw: str, floats: bool, others: Sequence[Callable[[Recorder], contextlib.AbstractContextManager[None]]] = ()
) -> Iterator[Calls]:
    """Record the launches of Triton kernels, and of ``others``, inside a ``with`` block (`npusim.record`).

    ``others``: contexts that record launches of other languages; with these, Triton may be missing.
    """
    has_triton = bool(find_spec("triton")) or not others
    if has_triton:
        release()
    device = load_device(hw)
    capability = int(device.architecture.rpartition("_")[2] or 0) if device.family == "nvidia" else 0
    if capability < 90:
        raise SpecError(f"record: {hw} is not a GPU of compute capability 9.0 or more; the default is h200")
    torch = import_module("torch") if find_spec("torch") else None
    recorder = Recorder(device.architecture, floats=floats)
    with contextlib.ExitStack() as stack:
        if has_triton:
            stack.enter_context(_of_triton(recorder, torch, device))
        if torch is not None:
            stack.enter_context(_torch_on_cpu(torch, device, capability))
        for other in others:
            stack.enter_context(other(recorder))
        yield recorder.calls


@contextlib.contextmanager
def _of_triton(recorder: Recorder, torch: Any, device: DeviceSpec) -> Iterator[None]:
    """Record launches of Triton's kernels."""
    if import_module("triton").knobs.runtime.interpret:
        raise SpecError("record: TRITON_INTERPRET is set, which runs kernels in Python; unset it")
    jit, tuner = (import_module(f"triton.runtime.{n}") for n in ("jit", "autotuner"))
    driver = import_module("triton.runtime").driver
    recorder.target = gpu_target(device.architecture)
    before = driver._active  # reading `active` creates a driver, which needs a GPU
    with (
        replaced(jit.JITFunction, run=as_method(recorder.launch)),
        replaced(tuner.Autotuner, run=as_method(recorder.tuned)),
    ):
        driver.set_active(_driver(recorder.target, torch, device))
        try:
            yield
        finally:
            driver._active = before


class UnreadFormatError(SpecError):
    """A tensor of a format that no call has."""


class Recorder:
    """Converts each launch to one call; the configurations of an autotuner belong to one call."""

    def __init__(self, architecture: str, *, floats: bool) -> None:
        self.target: object = None
        self.architecture, self.floats, self.calls = architecture, floats, Calls()
        # number of each storage, and a reference that prevents reuse of the address
        self._storages: dict[int, tuple[int, Any]] = {}
        self._texts: dict[Any, Any] = {}
        self._chosen: Mapping[str, Any] | None = None  # the options that a tuner has chosen, while it launches

    def launch(self, function: Any, *args: Any, grid: Any, warmup: bool = False, **given: Any) -> Launched:
        """Record a launch; one that only compiles (``warmup``) is not a launch."""
        for hook in function.pre_run_hooks:
            hook(*args, **given)
        names = [p.name for p in function.params]
        bound = function.signature.bind(*args, **{n: x for n, x in given.items() if n in names})
        bound.apply_defaults()
        options = {n: x for n, x in given.items() if n in OPTIONS and x is not None}
        launched = Launched(self, function, bound.arguments, options)
        if not warmup:
            self.add(launched, grid)
        return launched

    def add(self, launched: Launched, grid: Any) -> None:
        """Add a launch on a grid to the calls, or a tuner's next configuration to its call."""
        function, bound = launched.function, launched.arguments
        result = grid(dict(bound)) if callable(grid) else grid
        numbers = tuple(int(n) for n in (result if isinstance(result, tuple | list) else (result,)))
        if not 1 <= len(numbers) <= 3 or np.prod([float(n) for n in numbers]) > MOST_PROGRAMS:
            allowed = f"one to three numbers, at most {MOST_PROGRAMS:,} programs together"
            raise SpecError(f"{function.__name__}: a grid of {' x '.join(map(str, numbers))}; allowed: {allowed}")
        tuning = self._tuning if self._chosen is not None else None
        try:
            text, refused = launched.ttir()
            single = launched.by_parameter(text)
            recorded = {n: self.argument(n, x) for n, x in single.items()} if tuning is None else {}
            if tuning is None and re.search(r"tt\.int_to_ptr|tt\.bitcast.*ptr", text):
                recorded = self._with_addressed(recorded, text, single)
        except (
            UnreadFormatError,
            UnreadAddressError,
        ) as error:  # the launch is listed as one that npusim does not read
            recorded, text, refused = {}, "", str(error)
        constants = {n: _plain(x) for n, x in (self._chosen or {}).items() if n in bound}
        configuration = CallConfiguration(text, numbers, launched.options, constants, refused, launched.notes)
        if tuning is not None:
            call = self.calls[tuning]
            self.calls[tuning] = replace(call, configurations=(*call.configurations, configuration))
            return
        if self._chosen is not None:
            self._tuning = len(self.calls)
        path, name, line = place_of(function)
        self.calls.append(Call(name, path, line, launching_line(), recorded, (configuration,), release()))

    def _with_addressed(self, recorded: dict[str, Any], text: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with tensors to which addresses belong, and with second formats of tensors."""
        parameters = read(text).parameters
        recorded = with_tensors(recorded, parameters, floats=self.floats, number=self.fresh_storage, given=given)
        return with_other_formats(recorded, parameters, floats=self.floats)

    _tuning: int | None = None  # the call to which the tuner's configurations are added

    def tuned(self, tuner: Any, *args: Any, **given: Any) -> Any:
        """Launch every configuration of an autotuner; the first represents the program's launch."""
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        launched, self._tuning = None, None
        for config in tuner.prune_configs(given):
            chosen = config.all_kwargs()
            if config.pre_hook:
                config.pre_hook({**tuner.nargs, **given, **chosen})
            self._chosen = chosen
            try:
                result = tuner.fn.run(*args, **given, **chosen)
            finally:
                self._chosen = None
            launched = launched or result
        self._tuning = None
        return launched

    def text(self, function: Any, arguments: Mapping[str, Any], options: Mapping[str, int]) -> tuple[str, str]:
        """Return the TTIR of a launch, and Triton's message if it refuses it; compiled once for equal launches."""
        if why := refused_option(options):
            return "", f"{function.__name__}: {why}"
        given = {n: _pointer(x) for n, x in arguments.items()}
        return ttir_of(function, given, options, self.target, self._texts)

    def argument(self, name: str, x: Any) -> Any:
        """Return an argument in the form of a record."""
        x = x.value if type(x).__name__ == "constexpr" else x
        if type(x).__name__ == "TensorDescriptor":
            whole = self.argument(name, x.base)
            lists = {"shape": tuple(x.shape), "strides": tuple(x.strides), "block": tuple(x.block_shape)}
            return replace(whole, data=_strided(whole, lists["shape"], lists["strides"]), **lists)
        if type(x).__name__ == "TensorWrapper":  # triton.reinterpret
            return replace(self.argument(name, x.base), fmt=_format(x.dtype), data=None)
        if isinstance(x, np.ndarray):
            return self._view(x, x.shape, [s // x.itemsize for s in x.strides], x, _base(x))
        if hasattr(x, "untyped_storage"):
            return self._tensor(x)
        if isinstance(x, np.generic):
            return x.item()
        return x if isinstance(x, bool | int | float | str | None) else str(x)

    def fresh_storage(self) -> int:
        """Return the number of a storage that no other argument has."""
        return self._number(-1 - len(self._storages), None)

    def _number(self, address: int, storage: Any) -> int:
        return self._storages.setdefault(address, (len(self._storages), storage))[0]

    def _tensor(self, x: Any) -> Argument:
        x, torch = x.detach(), import_module("torch")
        storage, fmt = x.untyped_storage(), _format(x.dtype)
        if fmt not in INTEGERS and not is_format(fmt):
            raise SpecError(
                f"record: a tensor of {x.dtype}; integers and real numbers of npusim's formats are recorded"
            )
        number = self._number(storage.data_ptr(), storage)
        data = None
        if not x.dtype.is_floating_point:
            data = x.cpu().contiguous().numpy().copy()
        elif self.floats:
            bits = x.cpu().contiguous().view(getattr(torch, f"uint{8 * x.element_size()}")).numpy().copy()
            data = bits.view(_numpy_format(fmt))
        return Argument(tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), fmt, number, data)

    def _check_format(self, fmt: str) -> None:
        if fmt not in INTEGERS and not is_format(fmt):
            raise UnreadFormatError(
                f"record: a tensor of {fmt}; integers and real numbers of npusim's formats are recorded"
            )

    def _view(self, x: Any, shape: Any, strides: Any, values: Any, base: int) -> Argument:
        fmt = format_of_dtype(x.dtype)
        name = fmt.name if fmt is not None else str(x.dtype)
        self._check_format(name)
        is_kept = fmt is None or self.floats
        number = self._number(base, values)
        offset = (x.ctypes.data - base) // x.itemsize
        return Argument(tuple(shape), tuple(strides), offset, name, number, values.copy() if is_kept else None)


class Launched:
    """A stand-in for a compiled kernel, with the attributes that programs read, and its launch."""

    def __init__(
        self, recorder: Recorder, function: Any, arguments: Mapping[str, Any], given: Mapping[str, int]
    ) -> None:
        self._recorder, self.function, self.arguments, self._given = recorder, function, arguments, given
        options, self.notes = compiled_options(given)
        self.options: Mapping[str, int] = options

    def ttir(self) -> tuple[str, str]:
        """Return the TTIR, and Triton's message if it refuses the kernel."""
        return self._recorder.text(self.function, self.arguments, self.options)

    def by_parameter(self, text: str) -> Mapping[str, object]:
        """Return the arguments by the names of the TTIR's parameters."""
        if not text or not any(isinstance(x, tuple) for x in self.arguments.values()):
            return self.arguments
        given = {n: _pointer(x) for n, x in self.arguments.items()}
        return _by_parameter(self.arguments, kinds_of(self.function, given, self._recorder.target), text)

    def __getitem__(self, grid: Any) -> Any:
        """Return the function that launches the kernel on a grid, with all parameters and the constexprs of its
        compilation.
        """

        def launch(*args: Any, **given: Any) -> Launched:
            names = list(self.arguments)
            bound = {**self.arguments, **dict(zip(names, args, strict=False)), **given}
            launched = Launched(self._recorder, self.function, bound, self._given)
            self._recorder.add(launched, grid)
            return launched

        return launch

    def _init_handles(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        text, refused = self.ttir()
        if refused:
            raise SpecError(refused)
        result = compiled_text(text, code_architecture(self._recorder.architecture), self.options)
        known = {"n_regs": result.registers, "n_spills": result.spilled, "asm": {"ttir": result.ttir}}
        known["metadata"] = types.SimpleNamespace(shared=result.shared_bytes, name=self.function.__name__)
        if name not in known:
            raise AttributeError(f"record: a compiled kernel's {name!r} is not known without a GPU")
        return known[name]


class _Pointer:
    """The properties of a tensor that Triton reads: its format and address."""

    def __init__(self, dtype: Any, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


def _pointer(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return _Pointer(x.dtype, x.ctypes.data)
    if isinstance(x, tuple):
        return type(x)(*map(_pointer, x)) if hasattr(x, "_fields") else tuple(map(_pointer, x))
    return x.item() if isinstance(x, np.generic) else x


def _by_parameter(arguments: Mapping[str, object], kinds: Mapping[str, object], text: str) -> dict[str, object]:
    """Return arguments by the names of the TTIR's parameters, with the elements of tuples in place of the tuples.

    Triton writes a parameter for each element of a tuple, in order, except for elements that it compiles into the code
    (``kinds``); a name that a former parameter has is continued by a number.  Arguments that are compiled into the code
    have their own names, unless a parameter has the name.
    """
    parameters, result = read(text).parameters, dict[str, object]()
    rest = list(parameters)
    for name, x in arguments.items():
        if kinds[name] == "constexpr":
            result |= {} if name in parameters else {name: x}
            continue
        for kind, one in _leaves(kinds[name], x):
            if kind == "constexpr":
                continue
            result[rest[0]] = one
            written = parameters[rest[0]]
            sides = 2 * len(shape_of(written)[0]) if written.startswith("!tt.tensordesc") else 0
            del rest[: 1 + sides]  # with the sizes and strides of a descriptor's tensor
    return result


def _leaves(kind: object, x: object) -> Iterator[tuple[object, object]]:
    """Yield the elements of a tuple, and of tuples in it, with their types; any other argument itself."""
    if not isinstance(kind, tuple) or not isinstance(x, tuple):
        yield kind, x
        return
    for each in zip(kind, x, strict=True):
        yield from _leaves(*each)


def _plain(x: Any) -> Any:
    return x if isinstance(x, bool | int | float | str | None) else str(x)


def _base(x: Any) -> int:
    """Return the address of the storage of an array."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return int(x.ctypes.data)


def as_method(function: Any) -> Any:
    """Return a function in a form that becomes a method if it is an attribute of a class."""

    def method(*positional: Any, **by_name: Any) -> Any:
        return function(*positional, **by_name)

    return method


def _strided(x: Argument, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return the values of a storage in another shape; None if some of them are not known."""
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if x.data is None or last >= len(flat := x.elements()):
        return None
    return np.lib.stride_tricks.as_strided(flat, shape, [s * flat.itemsize for s in strides]).copy()


def _format(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def is_format(fmt: str) -> bool:
    """Return whether npusim has a format of floating-point numbers with that name."""
    from npusim.formats import get_format

    try:
        get_format(fmt)
    except NpusimError:
        return False
    return True


def _numpy_format(fmt: str) -> Any:
    from npusim.formats import get_format

    return get_format(fmt).dtype


def launching_line() -> str:
    """Return the file and line of the launch: the last frame that belongs neither to a language nor to this package."""
    frame = inspect.currentframe()
    own = {getattr(m, "__file__", "") for n, m in list(sys.modules.items()) if n.startswith(_LANGUAGES)}
    while frame is not None and frame.f_code.co_filename in own:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


# ---------------------------------------------------------------- a stand-in for the device


def _driver(target: Any, torch: Any, device: DeviceSpec) -> Any:
    """Return a stand-in for Triton's driver: it describes the device, and launches nothing."""
    warps = warp_issue(device)
    said = {"max_shared_mem": warps.block_memory_bytes.value, "multiprocessor_count": device.group_count.value}
    said |= {"max_num_regs": warps.registers_count.value, "warpSize": WARP}
    return types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda _device: dict(said)),
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_device_interface=lambda: torch.cuda,
        get_current_device=lambda: 0,
        get_current_stream=lambda _device=0: 0,
        set_current_device=lambda _device: None,
        get_benchmarker=lambda: lambda *_a, **_k: [1.0, 1.0, 1.0],  # milliseconds: all equal
        get_empty_cache_for_benchmark=lambda: torch.empty(1),
        clear_cache=lambda _cache: None,
    )


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace some attributes, and restore them."""
    missing = object()
    before = {n: owner.__dict__.get(n, missing) for n in attributes}
    for n, x in attributes.items():
        setattr(owner, n, x)
    try:
        yield
    finally:
        for n, x in before.items():
            delattr(owner, n) if x is missing else setattr(owner, n, x)


@contextlib.contextmanager
def _torch_on_cpu(torch: Any, device: DeviceSpec, capability: int) -> Iterator[None]:
    """Use the CPU for every GPU that a program requests from PyTorch, and answer as the device would."""

    def on_cpu(x: Any) -> Any:
        is_gpu = isinstance(x, str | torch.device) and re.match(r"(cuda|npu|xpu)\b", str(x))
        return torch.device("cpu") if is_gpu else x

    class Mode(import_module("torch.overrides").TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.cuda:
                return args[0]
            if function is torch.Tensor.is_cuda.__get__:
                return True
            if function is torch.Tensor.get_device:
                return 0
            if function is torch.device and args and isinstance(args[0], int):  # the accelerator is given by its number
                return torch.device("cpu")
            return function(*map(on_cpu, args), **{k: on_cpu(x) for k, x in (kwargs or {}).items()})

    class Nothing(contextlib.nullcontext):  # type: ignore[type-arg]
        def __init__(self, *_a: Any, **_k: Any) -> None:
            super().__init__()

    warps, shared = warp_issue(device), shared_memory_bytes(device)
    said = types.SimpleNamespace(
        multi_processor_count=device.group_count.value,
        name=f"NVIDIA {device.name.upper()}",
        major=capability // 10,
        minor=capability % 10,
        total_memory=device.memory.gm.capacity_bytes.value,
        L2_cache_size=device.memory.l2.capacity_bytes.value,
        warp_size=WARP,
        max_threads_per_multi_processor=warps.warps_count.value * WARP,
        regs_per_multiprocessor=warps.registers_count.value,
        shared_memory_per_multiprocessor=shared,
        shared_memory_per_block_optin=warps.block_memory_bytes.value,
    )
    stream = types.SimpleNamespace(cuda_stream=0, synchronize=lambda: None, wait_stream=lambda _s: None)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
    }
    answers |= {"get_device_properties": said, "get_device_capability": (said.major, said.minor), "_lazy_init": None}
    answers |= {"get_device_name": said.name, "current_stream": stream, "empty_cache": None, "synchronize": None}
    cuda: dict[str, Any] = {n: (lambda *_a, _x=x, **_k: _x) for n, x in answers.items()}
    cuda |= {"device": Nothing, "device_of": Nothing}
    with replaced(torch.cuda, **cuda), replaced(torch.Tensor, is_cuda=property(lambda _x: True)), Mode():
        yield
