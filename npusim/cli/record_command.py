"""``npusim record``: records a program's launches of Triton and TileLang kernels, without a GPU."""

import inspect
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from npusim.cli import options as o
from npusim.cli.console import say, show_either
from npusim.cli.help import Verbs
from npusim.errors import SpecError, absent
from npusim.kernels.triton import SIGN, launch_parts
from npusim.late_methods import dataclass
from npusim.simulation.request import refuse
from npusim.units import parse_count, plural

if TYPE_CHECKING:
    from npusim.kernels.triton.calls import Calls

app = Verbs()
FILE, GPU = "calls.npz", "h200"


@app.verb(
    "record",
    ("npusim record bench.py -- --dtype float16", "run a program with the arguments after --"),
    ("npusim record bench.py::main --seq 1024,4096", "call a function of the program with each size"),
    ("npusim record gemm.py::matmul -a M=512", "a kernel of TileLang-Ascend, read from its text"),
    ("npusim record calls.npz", "the content of a file"),
    ("npusim run calls.npz::0 --hw ascend_910b2", "run one of its calls like any schedule"),
)
def record(
    program: Annotated[str, o.argument("PROGRAM", "script.py, script.py::function, or calls.npz (to list its calls).")],
    arguments: Annotated[list[str] | None, o.argument("[-- ARGUMENTS]", "Arguments of the script (sys.argv).")] = None,
    *,
    out: Annotated[Path, o.option("--out -o FILE", "File of calls (.npz) to write.", shown=FILE)] = Path(FILE),
    seq: Annotated[
        str | None, o.option("--seq SIZES", "Call the function once with each size: 1024,4096.", shown=False)
    ] = None,
    values: Annotated[
        list[str] | None,
        o.option("--argument -a NAME=VALUE", "Argument of a TileLang-Ascend program; may be repeated.", shown=False),
    ] = None,
    hw: Annotated[str, o.option("--hw GPU", "GPU that the recorded program sees.", shown=GPU)] = GPU,
    floats: Annotated[bool, o.option("--floats", "Also record values of floating-point tensors.")] = False,
    json: o.Json = False,
) -> None:
    """Run a program on the CPU and record the Triton and TileLang kernels that it launches, with arguments and grids.

    Kernels do not run; tensors that belong on a GPU are on the CPU. The file has TTIR, integers and grids, but no code.
    Every verb with a schedule accepts calls.npz::0, the first call. A program of TileLang-Ascend runs with stand-ins
    for its package; script.py::function is then a kernel, or a function that returns a kernel and whose arguments -a
    passes.
    """
    from npusim.kernels.triton import SUFFIX
    from npusim.kernels.triton.calls import read_calls
    from npusim.report.run_inputs import calls_document, calls_table

    path, function = launch_parts(program)
    if path.endswith(SUFFIX):
        named: dict[str, Any] = {
            "--out": None if out == Path(FILE) else out,
            "--seq": seq,
            "--hw": None if hw == GPU else hw,
        }
        named |= {"--floats": floats or None, f"::{function}": function or None, "arguments": arguments or None}
        named["-a"] = values
        refuse(named, f"{path} is a file of recorded calls, which can only be listed: npusim record {path}")
        listed = path, read_calls(Path(path))
    else:
        of_script = _Script(Path(path), function, tuple(arguments or ()), seq, tuple(values or ()))
        listed = str(out), _recorded(of_script, hw, floats=floats)
        listed[1].save(out)
        say(f"wrote {out}: {len(listed[1])} {plural(len(listed[1]), 'call')}")
    show_either(json, lambda: calls_document(*listed), lambda: calls_table(*listed))


@dataclass(frozen=True, slots=True)
class _Script:
    """The program to record: its file, a function in it, the arguments of the program and those of the function."""

    path: Path
    function: str
    arguments: tuple[str, ...]
    seq: str | None
    values: tuple[str, ...]


def _recorded(script: _Script, hw: str, *, floats: bool) -> "Calls":
    """Return the calls of a program; raise `SpecError` if it fails, or launches nothing."""
    from npusim.kernels.tilelang.ascend_recording import is_ascend_program

    path, function, seq = script.path, script.function, script.seq
    if not path.is_file():
        raise SpecError(f"{path}: {absent(path)}; a program is script.py or script.py::function")
    if is_ascend_program(path):
        return _of_ascend(script, hw, floats=floats)
    if script.values:
        raise SpecError(f"-a {script.values[0]}: is for a program of TileLang-Ascend, FILE.py::program")
    if seq is not None and not function:
        raise SpecError(f"--seq {seq}: needs a function that is called with each size: {path}::FUNCTION")
    return _of_gpu(script, hw, floats=floats)


def _of_ascend(script: _Script, hw: str, *, floats: bool) -> "Calls":
    """Return the calls of a TileLang-Ascend program, or of one kernel of it."""
    from npusim.kernels.tilelang.ascend_recording import launched_calls, program_call
    from npusim.kernels.tilelang.program import argument_values

    named: dict[str, Any] = {"--seq": script.seq}
    if script.function:
        named |= {"--floats": floats or None, "arguments": script.arguments or None}
        refuse(
            named,
            f"{script.path}{SIGN}{script.function} is a kernel of TileLang-Ascend; pass its arguments "
            "with -a NAME=VALUE",
        )
        return program_call(script.path, script.function, argument_values(script.values))
    named["-a"] = script.values or None
    refuse(named, f"{script.path} is a program of TileLang-Ascend; write arguments of a script after --")
    calls = launched_calls(script.path, script.arguments, hw=hw, floats=floats)
    if not calls:
        name = f"{script.path}{SIGN}NAME"
        raise SpecError(f"{script.path}: the program launched no kernel; name one of its functions: {name} -a ...")
    return calls


def _of_gpu(script: _Script, hw: str, *, floats: bool) -> "Calls":
    """Return the calls of a program of Triton or TileLang."""
    from npusim.kernels.tilelang.recording import MISSING, PACKAGE
    from npusim.kernels.tilelang.recording import record as recording

    path, function, seq = script.path, script.function, script.seq
    sizes = [_size(text) for text in seq.split(",")] if seq is not None else [None]
    with recording(hw=hw, floats=floats) as calls, _as_main(path, list(script.arguments)):
        try:
            names = runpy.run_path(str(path), run_name="npusim_recorded" if function else "__main__")
            for size in sizes if function else ():
                _call(path, names, function, size)
        except SystemExit as error:
            if error.code not in (None, 0):
                say(f"{path} exits with {error.code}")
        except SpecError:
            raise
        except ModuleNotFoundError as error:
            if error.name != PACKAGE:
                raise SpecError(f"{_place(error, path)}: {error}") from error
            raise SpecError(f"{_place(error, path)}: {MISSING}") from None
        except Exception as error:
            raise SpecError(
                f"{_place(error, path)}: {type(error).__name__}: {error}, after {len(calls)} calls"
            ) from error
    if not calls:
        raise SpecError(f"{path}: the program launched no kernel of Triton or TileLang")
    return calls


def _call(path: Path, names: dict[str, Any], function: str, size: int | None) -> None:
    called = names.get(function)
    if not callable(called):
        listed = ", ".join(n for n, x in names.items() if inspect.isfunction(x) and not n.startswith("_"))
        raise SpecError(f"{path}: there is no function {function!r}; its functions are {listed or 'none'}")
    if size is None:
        called()
    else:
        called(seq=size) if "seq" in inspect.signature(called).parameters else called(size)


def _size(text: str) -> int:
    try:
        return parse_count(text)
    except ValueError:
        raise SpecError(f"--seq {text}: must be a positive whole number: 4096 or 4k") from None


def _place(error: Exception, path: Path) -> str:
    """Return the program's line that an error's traceback names last."""
    place, at = f"{path}", error.__traceback__
    while at is not None:
        if Path(at.tb_frame.f_code.co_filename).resolve() == path.resolve():
            place = f"{path}:{at.tb_lineno}"
        at = at.tb_next
    return place


@contextmanager
def _as_main(path: Path, arguments: list[str]) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as Python sets them for a script."""
    argv, search = sys.argv, list(sys.path)
    sys.argv, sys.path[:] = [str(path), *arguments], [str(path.resolve().parent), *search]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search
