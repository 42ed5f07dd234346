"""Triton's results for a kernel, without a device: TTIR, and for NVIDIA's chips registers, spills and shared memory.

A kernel's file need not be importable as a whole (it may need PyTorch, or begin to measure): only its imports that
succeed, its constants and its ``@triton.jit`` functions are executed.  Results are stored by content.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from threading import RLock
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import IO, Any, NamedTuple, Protocol
from weakref import finalize

from npusim import cache
from npusim.config.document import read_text
from npusim.errors import SpecError, absent
from npusim.kernels.triton import compiled_choices, releases
from npusim.kernels.triton.compiled_choices import UNKNOWN
from npusim.kernels.triton.releases import (
    adds_in_trees,
    as_installed,
    assembler,
    assembler_of,
    compiled_by,
    fused,
    release,
    tool,
)
from npusim.kernels.triton.ttir_text import Locations

#: Triton's names of formats in signatures.
POINTERS = MappingProxyType(
    {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
    | {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
)
#: The architecture whose TTIR is read for devices other than NVIDIA GPUs.
PLAIN = 90
_ALIGNMENT = 16
#: The operation bits of an instruction. Their values for products of warp groups: float16 and tf32, then FP8, each with
#: the left operand in shared memory or in registers. Their value for instructions that order such products.
_OPERATION, _GROUP_PRODUCTS, _WARP_GROUP = 0xFFF, frozenset({0x9F0, 0xDF0, 0x9F3, 0xDF3}), 0x9C5


class Parameter(NamedTuple):
    """One parameter of a kernel; ``default``: its text, empty if there is none."""

    name: str
    is_constexpr: bool
    default: str
    line: int


class Source(NamedTuple):
    """A kernel in its file."""

    path: str
    name: str
    line: int
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Compiled:
    """TTIR, and for NVIDIA's code: registers and spilled registers of a thread, shared bytes; 0 if no code was
    compiled.

    ``fuses``: whether multiplications and additions were contracted; ``contraction``, ``addends``, ``sums``,
    ``further``: which operations were contracted. ``down``: warps along the rows of its products.  ``orders``: the
    order of each of its sums by place (`npusim.kernels.triton.compiled_choices`). ``moved``: registers that a loop
    around products stores to local memory or loads, for the loop with the most. ``body``: the instructions of a warp
    for a block of a kernel without products (`npusim.machines.sm.compiled_rows`). ``loops``: the instructions of its
    loops around products of warp groups (`npusim.machines.sm.compiled_loops`). ``units``: the units of its products by
    place (`npusim.kernels.triton.compiled_choices.units_of`). ``is_serial``: whether warps wait for each product of
    warp groups (`_is_serial`). ``made_by``: the releases of Triton and of the assembler that compiled the code.
    ``is_foreign``: whether another compiler, whose choices are not known, compiles the code.
    """

    ttir: str
    registers: int = 0
    spilled: int = 0
    shared_bytes: int = 0
    fuses: bool = False
    down: int = 0
    orders: Mapping[str, str] = field(default_factory=dict)
    moved: int = 0
    body: str = ""
    loops: Sequence[str] = ()
    contraction: str = ""
    addends: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)
    further: Sequence[str] = ()
    units: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_serial: bool = False
    made_by: str = ""
    is_foreign: bool = False

    @property
    def choices(self) -> str:
        """A digest of the choices that decide bits; ``?`` if one is unknown, empty if no code was compiled."""
        if self.is_foreign or UNKNOWN in self.orders.values():
            return UNKNOWN
        by_place = sorted((place.partition("[")[0], order) for place, order in self.orders.items())
        return self.contraction and sha256(repr((self.contraction, by_place)).encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def source_of(path: str, name: str, _changed: int) -> Source:
    """Return a kernel's parameters as its file has them; raise `SpecError` if it has no such kernel."""
    tree = _tree(path)
    kernels = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef) and _is_kernel(n)}
    if name not in kernels:
        listed = ", ".join(kernels) or "none"
        raise SpecError(f"{path}: there is no kernel {name!r}; the file's functions with @triton.jit: {listed}")
    node, arguments = kernels[name], kernels[name].args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    parameters = []
    for a, default in zip(arguments.args, defaults, strict=True):
        is_constexpr = a.annotation is not None and "constexpr" in ast.unparse(a.annotation)
        parameters.append(Parameter(a.arg, is_constexpr, ast.unparse(default) if default else "", a.lineno))
    return Source(path, name, node.lineno, tuple(parameters))


def _tree(path: str) -> ast.Module:
    """Return a file's statements; raise `SpecError` for a text that is not Python."""
    try:
        return ast.parse(read_text(Path(path)), path)
    except SyntaxError as error:
        at = f"{path}:{error.lineno}" if error.lineno else path
        raise SpecError(f"{at}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):  # NUL characters, or expressions without an end
        raise SpecError(f"{path}: this is not a Python file that can be read") from None


def _is_kernel(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).partition("(")[0].rpartition(".")[2] == "jit" for d in node.decorator_list)


def compiled(
    source: Source,
    architecture: str,
    arguments: Mapping[str, Any],
    options: Mapping[str, int],
    check: Callable[[str], object] | None = None,
) -> Compiled:
    """Return Triton's result for a kernel and an architecture (by its number after ``_``; empty: only TTIR).

    ``arguments``: for each parameter a format (a pointer's element), ``(number,)`` for a constant, or a number; as in a
    launch, the compiler learns whether a number is 1 or a multiple of 16. ``check``: called with the TTIR before code
    is compiled, if no code is stored; it may refuse the kernel, since compilation of code takes ten times as long.
    Raises `SpecError`: Triton is missing, its release is untried, or it refuses the kernel.
    """
    signature = {n: _type(value) for n, value in arguments.items()}
    constants = {n: x[0] if isinstance(x, tuple) else x for n, x in arguments.items() if signature[n] == "constexpr"}
    aligned = [n for n, value in arguments.items() if _is_aligned(value)]
    call = sorted(signature.items()), sorted(constants.items()), aligned, sorted(options.items())
    named = source.path, source.name, architecture, call, _content(source.path)
    stamp = cache.digest("triton", *compiled_by(), _reading(), *named)
    name = f"{stamp.hex()[:16]}.triton"
    if (kept := cache.load(name, stamp)) is not None:
        document = json.loads(kept)
        if all(_content(f) == content for f, content in document.pop("files").items()):
            return Compiled(**document)
    with cache.alone(name):
        result = _compile(source, architecture, (signature, constants, aligned), options, check)
    files = {f: _content(f) for f in sorted(Locations(result.ttir).files())}
    cache.store(name, stamp, json.dumps({**asdict(result), "files": files}).encode(), is_silent=True)
    return result


@lru_cache(maxsize=1)
def _reading() -> tuple[str, ...]:
    """Return digests of the files that read compiled code: results of an earlier version are not valid for this one."""
    from npusim.machines.sm import compiled_loops, compiled_rows

    files = __file__, compiled_choices.__file__, compiled_rows.__file__, compiled_loops.__file__, releases.__file__
    return tuple(_content(str(file)) for file in files)


def _content(path: str) -> str:
    try:
        return sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _type(value: object) -> str:
    if isinstance(value, tuple) or value is None or (value == 1 and isinstance(value, int)):
        return "constexpr"
    if isinstance(value, str):
        return f"*{POINTERS[value]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if isinstance(value, int) and -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and value != 1 and value % _ALIGNMENT == 0)


#: Options of a launch that are not parameters of the kernel but change its code, with the values that are compiled: a
#: block has at most 1,024 threads, and a cluster at most 16 blocks (CUDA); a pipeline with more stages than fit in a
#: multiprocessor's memory takes minutes to compile. A thread has at most 255 registers: kernels also write the limit
#: 256, which ptxas accepts.
OPTIONS: Mapping[str, Sequence[int]] = MappingProxyType(
    {"num_warps": (1, 2, 4, 8, 16, 32), "num_stages": range(1, 17), "num_ctas": (1, 2, 4, 8, 16)}
    | {"maxnreg": range(1, 257), "enable_fp_fusion": (0, 1)}
)
#: Values of options of a ``triton.Config`` that are not named, except warps and stages (triton 3.6).
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"num_ctas": 1, "maxnreg": None, "ir_override": None, "minRegAutoWS": None, "maxRegAutoWS": None}
)


def refused_option(options: Mapping[str, Any]) -> str:
    """Return why options of a launch are not compiled; empty if they are compiled."""
    for name, value in options.items():
        allowed = OPTIONS.get(name, ())
        if value not in allowed:
            some = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
            return f"{name}={value!r}; allowed: {some or 'no such option'}"
    return ""


def compiled_options(options: Mapping[str, int]) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """Return the options of a launch as they are compiled, and the notes on those that differ: Triton's compiler
    pipelines no loop with 0 stages, as with 1.
    """
    if options.get("num_stages") != 0:
        return options, ()
    return {**options, "num_stages": 1}, ("num_stages=0 is read as num_stages=1: Triton pipelines no loop with either",)


_CHILD = Path(__file__).with_name("compiler_process.py")
#: pytest's name of the running test: the compiler does not read it, and would otherwise start again for each test,
#: which takes a second.
_RUNNING_TEST = "PYTEST_CURRENT_TEST"


def compiled_text(
    ttir: str, architecture: str, options: Mapping[str, int], check: Callable[[str], object] | None = None
) -> Compiled:
    """Return Triton's result for a kernel's TTIR and an architecture; with an empty one only the TTIR.

    ``check``: as for `compiled`.  Raises `SpecError`: Triton is missing, its release is untried, or it refuses the
    kernel.
    """
    if not architecture:
        return Compiled(ttir)
    call = cache.digest(ttir, architecture, sorted(options.items()))
    stamp = cache.digest("ttir", *compiled_by(), _reading(), call)
    name = f"{stamp.hex()[:16]}.triton"
    if (kept := cache.load(name, stamp)) is not None:
        return Compiled(ttir, **json.loads(kept))
    if check is not None:
        check(ttir)
    known = _measured(_code_of(ttir, architecture, options), ttir, architecture)
    content = {n: x for n, x in asdict(known).items() if n != "ttir"}
    cache.store(name, stamp, json.dumps(content).encode(), is_silent=True)
    return known


class _Code(NamedTuple):
    """Triton's code for a chip: the binary, the texts of two stages before it, and bytes of shared memory."""

    cubin: bytes
    ttgir: str
    ptx: str
    shared: int


def _code_of(ttir: str, architecture: str, options: Mapping[str, int]) -> _Code:
    """Return the code of a text from any source; the compiler runs in a separate process, because it may end its
    process.
    """
    at = next(iter(sorted(Locations(ttir).files())), "TTIR")
    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder, "kernel.ttir"), Path(folder)
        text.write_text(as_installed(ttir))
        call = {"text": str(text), "architecture": int(architecture.rpartition("_")[2]), "folder": folder}
        ended = _asked({**call, "options": fused(options)})
        if (refused := out / "error").is_file():
            raise SpecError(f"{at}: Triton cannot compile for {architecture}: {_last_line(refused.read_text())}")
        if ended:
            raise SpecError(
                f"{at}: Triton's compiler stops at this TTIR with {ended}: Triton did not produce this text"
            )
        texts = ((out / name).read_text() for name in ("ttgir", "ptx", "shared"))
        ttgir, ptx, shared = texts
        return _Code((out / "cubin").read_bytes(), ttgir, ptx, int(shared))


def _asked(call: Mapping[str, Any]) -> str:
    """Let a compiler's process compile a call; return how the process ended, empty if it continues.

    A process serves one call at a time, in the environment with which it was started.
    """
    idle, now = _idle(os.getpid()), {n: value for n, value in os.environ.items() if n != _RUNNING_TEST}
    process = idle.pop() if idle else _CompilerProcess(now)
    if process.environment != now:
        process.end()
        process = _CompilerProcess(now)
    ended = process.compile(call)
    if not ended:
        idle.append(process)
    return ended


@lru_cache(maxsize=1)
def _idle(_process: int) -> list[_CompilerProcess]:
    """Return the compilers that this process has started and that wait for a call; a forked process has its own."""
    return []


class _CompilerProcess:
    """A process with Triton's compiler, whose import takes longer than most kernels."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process runs
        words, pipe = [sys.executable, str(_CHILD)], subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        self.end = finalize(self, _ended, self._process, self._errors)

    def compile(self, call: Mapping[str, Any]) -> str:
        """Return how the process ended during a call, empty if it answered."""
        asked, answers = self._process.stdin, self._process.stdout
        if asked is None or answers is None:
            raise AssertionError("a compiler's process has pipes")
        try:
            asked.write(f"{json.dumps(call)}\n")
            asked.flush()
            answer = answers.readline()
        except OSError:  # the process ended before the call
            answer = ""
        if answer:
            return ""
        code = self._process.wait()
        self._errors.seek(0)
        said = _last_line(self._errors.read())
        self.end()
        return signal.Signals(-code).name if code < 0 else said or f"exit code {code}"


def _ended(process: subprocess.Popen[str], errors: IO[str]) -> None:
    """Close a compiler's input, at which it ends."""
    for file in (process.stdin, process.stdout, errors):
        if file is not None:
            with suppress(OSError):
                file.close()
    process.wait()


def ttir_of(
    function: Any, arguments: Mapping[str, Any], options: Mapping[str, Any], target: Any, known: dict[Any, Any]
) -> tuple[str, str]:
    """Return the TTIR of a launch of a ``JITFunction``, or an empty text and Triton's message if it refuses the kernel.

    ``arguments``: for all parameters; an argument with ``data_ptr()`` is a tensor.  ``known``: results of launches with
    the same compilation, filled here.
    """
    try:
        backend, bound, special = _bound(function, arguments, target)
        key = id(function), repr(special)
        if key not in known:
            _, *signature = function._pack_args(backend, fused(options), bound, special, {})
            written = import_module("triton.compiler").ASTSource(function, *signature)
            known[key] = _ttir(written, target, options), function
    except Exception as error:  # noqa: BLE001 - whatever the compiler says
        return "", _told(error, Source(*place_of(function), ()))
    return str(known[key][0]), ""


class _Signed(Protocol):
    """The properties of a ``JITFunction`` by which Triton binds the arguments of a launch."""

    signature: object
    params: object


def kinds_of(function: _Signed, arguments: Mapping[str, Any], target: object) -> dict[str, object]:
    """Return Triton's types of the arguments of a launch, by parameter: a tuple for a tuple, and ``constexpr`` for one
    that is compiled into the code; arguments as in `ttir_of`, which has compiled the launch.
    """
    _, bound, special = _bound(function, arguments, target)
    return {n: kind for n, (kind, *_) in zip(bound, special, strict=True)}


def _bound(function: _Signed, arguments: Mapping[str, Any], target: object) -> tuple[Any, Any, Any]:
    """Return Triton's backend, the arguments of a launch, and what their types and values select."""
    jit, backends = import_module("triton.runtime.jit"), import_module("triton.compiler.compiler")
    backend = backends.make_backend(target)
    bound, special, _ = jit.create_function_from_signature(function.signature, function.params, backend)(**arguments)
    return backend, bound, special


def place_of(function: Any) -> tuple[str, str, int]:
    """Return the file, name and line of the ``def`` of a ``JITFunction``."""
    above = re.split(
        r"(?m)^\s*def\s", function.raw_src if isinstance(function.raw_src, str) else "".join(function.raw_src)
    )
    return function.fn.__code__.co_filename, function.__name__, function.starting_line_number + above[0].count("\n")


def gpu_target(architecture: str) -> Any:
    """Return Triton's name of an architecture (``sm_90``); for an empty one the default's."""
    number = int(architecture.rpartition("_")[2] or PLAIN)
    return import_module("triton.backends.compiler").GPUTarget("cuda", number, 32)


def _compile(
    source: Source,
    architecture: str,
    call: tuple[dict[str, str], dict[str, object], list[str]],
    options: Mapping[str, int],
    check: Callable[[str], object] | None,
) -> Compiled:
    triton = import_module("triton")
    written_of = import_module("triton.compiler").ASTSource
    signature, constants, aligned = call
    names = _module(source.path, _content(source.path)).__dict__
    if source.name not in names:
        raise SpecError(names[_FAULTS][source.name])
    function = names[source.name]
    target = gpu_target(architecture)
    attributes = {(i,): [["tt.divisibility", _ALIGNMENT]] for i, n in enumerate(signature) if n in aligned}
    try:
        written = written_of(fn=function, signature=signature, constexprs=constants, attrs=attributes)
        if not architecture:
            return Compiled(_ttir(written, target, options))
        text = _ttir(written, target, options) if check else ""
    except Exception as error:  # noqa: BLE001 - more than the compiler takes, whatever it says
        raise SpecError(_told(error, source)) from None
    if check:
        check(text)
    try:
        with _bounded():
            result = triton.compile(written, target=target, options=fused(options))
    except Exception as error:  # noqa: BLE001 - more than the compiler takes, whatever it says
        raise SpecError(_told(error, source)) from None
    ttir = result.asm["ttir"]
    if own := re.search(r'^#loc = loc\("(.*?)":', ttir, re.MULTILINE):  # Triton stores its result for the same text
        ttir = ttir.replace(f'"{own[1]}"', f'"{source.path}"')
    made_code = _Code(result.asm["cubin"], result.asm["ttgir"], result.asm["ptx"], result.metadata.shared)
    return _measured(made_code, ttir, architecture)


def _measured(made: _Code, ttir: str, architecture: str) -> Compiled:
    """Return the resources that Triton's code needs on a chip, and the choices in it that decide bits."""
    from npusim.machines.sm import compiled_loops, compiled_rows

    used = _tool("cuobjdump", "-res-usage", cubin=made.cubin)
    registers, stack = (int(re.findall(rf"{key}:(\d+)", used)[0]) for key in ("REG", "STACK"))
    # disassembly takes longer than compilation: it runs only when a text is read
    disassembled = lru_cache(_disassembled)
    sass = disassembled(made.cubin) if stack or compiled_rows.has_body(made.ptx, architecture) else ""
    down = re.search(r"nvidia_mma<.*?warpsPerCTA = \[(\d+)", made.ttgir)

    def assembled() -> list[str]:
        plain = _unfused(made.ptx)
        if _machine_code(made.cubin) == _machine_code(plain):
            return []
        return [disassembled(cubin) for cubin in (made.cubin, plain)]

    contraction = compiled_choices.contraction_of(made.ptx, made.ttgir, assembled)
    return Compiled(
        ttir,
        registers,
        stack // 4,
        made.shared,
        fuses="fma.rn" in made.ptx,
        down=int(down[1]) if down else 0,
        orders=compiled_choices.orders_of(made.ttgir, is_tree=adds_in_trees()),
        moved=_moved(sass) if stack else 0,
        body=compiled_rows.body_of(sass, architecture),
        loops=compiled_loops.loops_of(disassembled(made.cubin)) if compiled_loops.has_loops(made.ptx) else (),
        contraction=contraction.digest,
        addends=contraction.addends,
        sums=contraction.sums,
        further=contraction.further,
        units=compiled_choices.units_of(made.ttgir),
        is_serial=_is_serial(made.cubin),
        made_by=assembler_of(architecture),
    )


def _tool(name: str, *words: str, cubin: bytes) -> str:
    """Return the output of one of Triton's tools for machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool(name)), *words, file.name]
        return str(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _disassembled(cubin: bytes) -> str:
    """Return a cubin's instructions with their codes and lines of the source; targets of branches are addresses."""
    text, at, names = _tool("nvdisasm", "-c", "-g", "-hex", "-ndf", cubin=cubin), dict[str, str](), list[str]()
    for label, address in re.findall(r"(?m)^(\.L_\w+):|^\s+/\*([0-9a-f]{4,})\*/", text):
        if label:
            names.append(label)
        else:
            at |= dict.fromkeys(names, f"0x{int(address, 16):x}")
            names.clear()
    return re.sub(r"`\((\.L_\w+)\)", lambda match: at.get(match[1], match[0]), text)


def _machine_code(cubin: bytes) -> dict[str, bytes]:
    """Return the sections of instructions of a cubin, an ELF file of 64 bits, by their names."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    heads = [struct.unpack_from("<2I4Q", cubin, table + size * number) for number in range(count)]

    def name_of(offset: int) -> str:
        begin = heads[names][4] + offset
        return cubin[begin : cubin.index(b"\0", begin)].decode()

    named = ((name_of(head[0]), head[4], head[5]) for head in heads)
    return {name: cubin[begin : begin + length] for name, begin, length in named if name.startswith(".text")}


def _is_serial(cubin: bytes) -> bool:
    """Return whether warps wait for each of several products of warp groups, according to the instructions before the
    products.

    Operation of sm_90, the low 12 bits of an instruction: ``WARPGROUP``; without a number (``ARRIVE``) it begins
    consecutive products, and ptxas puts one before each product if it waits for each (nvdisasm 12.8).
    """
    words = [struct.unpack(f"<{len(code) // 8}Q", code)[::2] for code in _machine_code(cubin).values()]
    products = sum(word & _OPERATION in _GROUP_PRODUCTS for code in words for word in code)
    begun = sum(word & _OPERATION == _WARP_GROUP and not word >> 32 for code in words for word in code)
    return bool(2 < products <= begun)


def _unfused(ptx: str) -> bytes:
    """Return the machine code into which ptxas assembles PTX if it contracts nothing."""
    target = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        words = [*assembler(int(re.findall(r"\d+", target)[0])), "-lineinfo", "--fmad=false", f"--gpu-name={target}"]
        subprocess.run([*words, str(source), "-o", str(cubin)], check=True, capture_output=True)
        return cubin.read_bytes()


def _moved(sass: str) -> int:
    """Return the number of spilled registers that a loop around products, to which a branch leads back, stores or
    loads.

    An instruction of 64 or 128 bits accesses two or four registers.
    """
    line = r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ +)?(\w+)(?:\.(64|128)\b|\.\w+)*(?: +(?:!?U?P\w+, )?0x([0-9a-f]+) ;)?"
    found = re.findall(line, sass)
    code = [(int(at, 16), name, int(bits or 32) // 32, int(to or "0", 16)) for at, name, bits, to in found]
    spans = [(to, at) for at, name, _, to in code if name == "BRA" and 0 < to < at]
    products = (at for at, name, *_ in code if name.endswith("MMA"))
    around = {max((s for s in spans if s[0] <= at <= s[1]), default=(0, -1)) for at in products}
    local = [(at, count) for at, name, count, _ in code if name in ("LDL", "STL")]
    return max((sum(count for at, count in local if a <= at <= b) for a, b in around), default=0)


def _ttir(written: Any, target: Any, options: Mapping[str, int]) -> str:
    ir = import_module("triton._C.libtriton").ir
    backend = import_module("triton.compiler.compiler").make_backend(target)
    context, stages = ir.context(), dict[str, Any]()
    parsed = backend.parse_options({**fused(options), **written.parse_options()})
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, parsed, written.language)
    with _bounded():
        module = written.make_ir(
            target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
        )
    return str(stages["ttir"](module, {}))


def _told(error: Exception, source: Source) -> str:
    """Return a compiler's message, with the kernel's line if the message names one, and without the names of Python's
    own errors.
    """
    own = str(error) if isinstance(error, SpecError) else ""
    error = error.__cause__ if own and isinstance(error.__cause__, Exception) else error
    at = re.search(r"at (\d+):\d+", str(error))
    line = source.line + int(at[1]) if at else source.line
    if own:
        return f"{source.path}:{line}: {own}"
    while isinstance(error.__cause__, Exception):  # causes may be raised by functions that the kernel inlines
        error = error.__cause__
    kind = "" if type(error).__module__ == "builtins" else f"{type(error).__name__}: "
    return f"{source.path}:{line}: Triton refuses {source.name}: {kind}{_last_line(str(error))}"


def _last_line(text: str) -> str:
    """Return the last line of an error's text that is not a caret, without names of Python's own errors."""
    lines = [line for line in text.splitlines() if line.strip(" ^")]
    return re.sub(r"^\w*Error(?:Impl)?\(['\"](.*)['\"]\)$", r"\1", lines[-1].strip() if lines else "")


#: Largest number of iterations of ``tl.static_range`` in one kernel: Triton's front end expands each one, which takes
#: 10 s for this number.
MOST_WRITTEN_OUT = 1024


@lru_cache
def _turn() -> Any:
    """Return the lock for replacing a method of Triton's front end: each user restores the original."""
    return RLock()


@contextmanager
def _bounded() -> Iterator[None]:
    """Let Triton's front end refuse a kernel whose ``tl.static_range`` loops together have more than `MOST_WRITTEN_OUT`
    iterations.
    """
    with _turn():
        yield from _counting()


def _counting() -> Iterator[None]:
    kind = import_module("triton.language").static_range
    begin, count, why = kind.__init__, 0, ""

    def counted(self: object, *args: object, **named: object) -> None:
        nonlocal count, why
        begin(self, *args, **named)
        start, end, step = (getattr(self, n).value for n in ("start", "end", "step"))
        count += len(range(start, end, step))
        if count > MOST_WRITTEN_OUT:
            why = f"tl.static_range: {count:,} iterations, which Triton unrolls; a kernel may have at most "
            why += f"{MOST_WRITTEN_OUT:,}; use range(), which stays a loop"
            raise SpecError(why)

    kind.__init__ = counted
    try:
        yield
    except Exception as error:
        if why:  # the front end raises its own error
            raise SpecError(why) from error
        raise
    finally:
        kind.__init__ = begin


#: Name, in a module, of the mapping from kernels that cannot be compiled to their errors.
_FAULTS = "npusim's faults"


@lru_cache(maxsize=16)
def _module(path: str, _digest: str) -> ModuleType:
    tree = _tree(path)
    module = ModuleType(f"npusim_triton_{Path(path).stem}")
    module.__file__ = path
    module.__dict__[_FAULTS] = dict[str, str]()
    sys.modules[module.__name__] = module
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        for node in tree.body:
            parts = [ast.Import([name]) for name in node.names] if isinstance(node, ast.Import) else [node]
            for part in parts:  # one of several modules may be missing
                _execute(ast.fix_missing_locations(ast.copy_location(part, node)), module, path)
    finally:
        sys.path.remove(folder)
    return module


def decorators_of(path: str, name: str, kind: str, architecture: str) -> list[Any]:
    """Return the arguments of a kernel's decorators of a ``kind``: ``autotune`` configurations, ``heuristics``
    functions.

    In addition to the statements of `_module`, statements that the decorators need are executed, as if a GPU of the
    architecture were present.  Raises `SpecError` if they cannot be evaluated.
    """
    release()
    file = Path(path)
    if not file.is_file():
        raise SpecError(f"{path}: {absent(file)}")
    path = str(file.resolve())
    source_of(path, name, file.stat().st_mtime_ns)
    tree, names, values = _tree(path), dict(_module(path, _content(path)).__dict__), list[Any]()
    kernel = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    for decorator in kernel.decorator_list:
        called = ast.unparse(decorator).partition("(")[0].rpartition(".")[2]
        if not isinstance(decorator, ast.Call) or called != kind:
            continue
        wanted = "configs" if kind == "autotune" else "values"
        value = next((k.value for k in decorator.keywords if k.arg == wanted), None) or decorator.args[0]
        try:
            with _as_on(architecture):
                for node in _needed(tree, value):
                    exec(compile(ast.Module([node], []), path, "exec"), names)
                given = eval(compile(ast.Expression(value), path, "eval"), names)
                values.append(list(given) if kind == "autotune" else dict(given))
        except Exception as error:  # noqa: BLE001 - a user's expression, whatever it raises
            at = f"{path}:{decorator.lineno}: @{ast.unparse(decorator.func)}"
            raise SpecError(f"{at}: {wanted} cannot be evaluated here: {error}; give -f FIELD=VALUES") from None
    return values


@contextmanager
def _as_on(architecture: str) -> Iterator[None]:
    """If a file asks Triton which GPU is active, answer with a GPU of the architecture."""
    config: Any = import_module("triton.runtime").driver
    before = config._active
    config.set_active(SimpleNamespace(get_current_target=lambda: gpu_target(architecture)))
    try:
        yield
    finally:
        config._active = before


def _needed(tree: ast.Module, expression: ast.expr) -> list[ast.stmt]:
    """Return a file's plain functions and assignments that an expression needs, in their order."""
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not _is_kernel(node):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
    wanted, waiting = list[ast.stmt](), list[ast.AST]([expression])
    while waiting:
        for name in (n.id for n in ast.walk(waiting.pop()) if isinstance(n, ast.Name)):
            if name in defined and defined[name] not in wanted:
                wanted.append(defined[name])
                waiting.append(defined[name])
    return [node for node in tree.body if node in wanted]


def function_of(path: str, name: str) -> Any:
    """Return a plain function of a kernel's file; raise `SpecError` if it has none of that name."""
    module = _module(path, _content(path))
    tree = _tree(path)
    node = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if node is None:
        raise SpecError(f"{path}: there is no function {name!r}, which reference= names")
    exec(compile(ast.Module([node], []), path, "exec"), module.__dict__)
    return module.__dict__[name]


def _unchanged() -> ast.expr:
    """Return a decorator that changes nothing."""
    return ast.parse("lambda function: function", mode="eval").body


#: Arguments of ``@triton.jit`` for profilers: functions that do not change the code.
_FOR_PROFILERS = ("launch_metadata", "repr")


def _of_code(decorator: ast.expr) -> ast.expr:
    """Return ``@triton.jit`` without the arguments that change no code."""
    if isinstance(decorator, ast.Call):
        decorator.keywords = [k for k in decorator.keywords if k.arg not in _FOR_PROFILERS]
    return decorator


def _execute(node: ast.stmt, module: ModuleType, path: str) -> None:
    """Execute an import, constant or kernel of a file.  Statements that fail are omitted; a kernel that needs one of
    them reports it.
    """
    is_constant = isinstance(node, ast.Assign | ast.AnnAssign) and all(
        "constexpr" in ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)
    )
    if isinstance(node, ast.FunctionDef) and _is_kernel(node):
        # Other statements are replaced by ones that change nothing, so that lines stay the same and the kernel has the
        # key that it has in Triton's cache.
        is_jit = [(d, "jit" in ast.unparse(d).partition("(")[0]) for d in node.decorator_list]
        node.decorator_list = [_of_code(d) if jit else ast.copy_location(_unchanged(), d) for d, jit in is_jit]
    elif not (isinstance(node, ast.Import | ast.ImportFrom) or is_constant):
        return
    try:
        exec(compile(ast.fix_missing_locations(ast.Module([node], [])), path, "exec"), module.__dict__)
    except Exception as error:  # noqa: BLE001 - of a module that is not there, whatever it says
        if isinstance(node, ast.FunctionDef):  # the file may also contain a kernel that does not need this one
            module.__dict__[_FAULTS][node.name] = f"{path}:{node.lineno}: {type(error).__name__}: {error}"
