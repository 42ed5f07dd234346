"""A wrapper as a candidate: a Python function that launches Triton kernels, recorded at the sizes of each call.

The name of a wrapper is ``FILE.py::function(arguments)``: a launch without a grid, with the same names of arguments.
Arguments are arrays, PyTorch's if the file imports PyTorch, else NumPy's.  Kernels do not run while they are recorded,
so that values that the function itself computes from their results are unknown; such a candidate is refused.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.config import outside
from npusim.errors import SpecError
from npusim.formats import get_format
from npusim.kernels.triton import launch_parts
from npusim.kernels.triton.compiler import Parameter, Source
from npusim.kernels.triton.launch import Launch, evaluated, names_of
from npusim.kernels.triton.recording import recording, replaced
from npusim.kernels.triton.values import Tensor
from npusim.program.numerics.evaluate import named_choices
from npusim.program.numerics.paths import bits_of
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.plan import plan_of
from npusim.simulation.run_result import arithmetic_evidence
from npusim.simulation.sequence import Storages
from npusim.simulation.simulate import BuiltPlan
from npusim.studies.evaluate.arguments import four_axes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    from numpy.typing import NDArray

    from npusim.config.problem import AnyProblem
    from npusim.kernels.triton.calls import Argument, Calls
    from npusim.kernels.triton.recording import Recorder
    from npusim.simulation.request import Request
    from npusim.studies.evaluate.child import Question

#: Functions that return memory without values, by package: the memory contains NaN while a wrapper is recorded.
EMPTY = MappingProxyType({"numpy": ("empty", "empty_like"), "torch": ("empty", "empty_like", "empty_strided")})
#: The GPU that a wrapper detects, as in programs that `npusim record` runs.
RECORDED_FOR = "h200"
_FORM = (
    "FILE.py::function(arguments), for example `rms.py::norm(tensor(R, N), tensor(N))` or `fa.py::attention(q, k, v)`"
)


@dataclass(frozen=True)
class Recorded:
    """The calls of a wrapper, its inputs by name as arguments of a call, and its results by name, as views."""

    calls: Calls
    inputs: Mapping[str, Argument]
    results: Mapping[str, Argument]


def recorded(question: Question) -> Recorded:
    """Return the launches of a wrapper at the sizes of a question, with the values of its tensors if there are any.

    Raises `SpecError` if there is no such function, if its launches do not have an option, or if it launches no kernel.
    """
    request = question.request
    if request.tiling:
        named = ", ".join(dict(request.tiling))
        raise SpecError(f"tiling: {named}: a wrapper sets the fields of its launches itself; remove them")
    path, text = launch_parts(str(request.schedule))
    with np.errstate(all="ignore"):  # the wrapper may compute with memory that has no values
        module, _ = outside.load(f"{path}:", "a wrapper")
        function, launch = _called(module.__dict__, path, text)
        problem = request.problem if request.problem is not None else request.attention()
        arguments = _arguments(launch, problem)
        given = {str(n): np.asarray(x) for n, x in _given(request.tensors).items()}
        torch = sys.modules.get("torch") if "torch" in vars(module) else None
        values = {n: _array(n, x, given, torch) if isinstance(x, Tensor) else x for n, x in arguments.items()}
        recorders = list["Recorder"]()

        @contextlib.contextmanager
        def caught(recorder: Recorder) -> Iterator[None]:
            recorders.append(recorder)
            yield

        with (
            recording(hw=RECORDED_FOR, floats=True, others=[caught]) as calls,
            _filled(torch),
            outside.with_origin(path),
        ):
            returned = function(**values)
        if not calls:
            raise SpecError(f"{path}: {launch.source.name} launched no kernel of Triton")
        (recorder,) = recorders
        tensors = {n: recorder.argument(n, values[n]) for n, x in arguments.items() if isinstance(x, Tensor)}
        results = {n: recorder.argument(n, x) for n, x in _results(returned).items()}
    return Recorded(calls, tensors, results)


def _called(names: Mapping[str, Any], path: str, text: str) -> tuple[Callable[..., Any], Launch]:
    """Return the function of a wrapper's name, and its call as a launch on a grid of one program."""
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise SpecError(f"{path}: {text[:200]!r} is not a call; a wrapper is {_FORM}")
    name = call.func.id
    function = names.get(name)
    if not isinstance(function, FunctionType):
        kind = (
            "not a function of the file" if function is None else "a kernel: its launch has a grid, [grid](arguments)"
        )
        listed = ", ".join(
            n for n, x in names.items() if isinstance(x, FunctionType) and x.__module__ == names["__name__"]
        )
        raise SpecError(f"{path}: {name}: {kind}; a wrapper is {_FORM}; functions: {listed or 'none'}")
    parameters = inspect.signature(function).parameters
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        raise SpecError(f"{path}: {name}: write arguments one at a time, without * or **")
    if len(call.args) > len(parameters):
        raise SpecError(f"{path}: {name}: {len(call.args)} arguments; its parameters are {', '.join(parameters)}")
    given = dict(zip(parameters, map(ast.unparse, call.args), strict=False))
    for keyword in call.keywords:
        if keyword.arg not in parameters or keyword.arg in given:
            why = "has two values" if keyword.arg in given else "is no parameter"
            raise SpecError(f"{path}: {name}: {keyword.arg} {why}; its parameters are {', '.join(parameters)}")
        given[str(keyword.arg)] = ast.unparse(keyword.value)
    left = [n for n, p in parameters.items() if n not in given and p.default is p.empty]
    if left:
        raise SpecError(f"{path}: {name}: parameter {left[0]} has no argument: {left[0]}=...")
    line = function.__code__.co_firstlineno
    source = Source(path, name, line, tuple(Parameter(n, False, "", line) for n in given))
    return function, Launch(source, "1", given, (), {})


def _arguments(launch: Launch, problem: AnyProblem) -> dict[str, Any]:
    """Return a wrapper's arguments by parameter: tensors, each with a name, and numbers."""
    names = names_of(problem)
    used = {n.id for text in launch.arguments.values() for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    if unused := [n for n in getattr(problem, "sizes", {}) if n not in used]:
        raise SpecError(
            f"problem: {launch.source.name} has no size {unused[0]!r}; the sizes in its call: {', '.join(sorted(used))}"
        )
    values = {n: evaluated(launch, n, names) for n in launch.arguments}
    for n, x in values.items():
        if not isinstance(x, Tensor | int | float | str | None):
            raise SpecError(f"{launch.source.name}: {n}: must be a tensor or a number, got {x!r}")
    return {n: replace(x, name=x.name or n) if isinstance(x, Tensor) else x for n, x in values.items()}


def _given(tensors: object) -> Mapping[str, Any]:
    return tensors if isinstance(tensors, dict) else {}


def _array(parameter: str, tensor: Tensor, given: Mapping[str, NDArray[Any]], torch: ModuleType | None) -> object:
    """Return the array of a tensor: its values, if they are given, in the call's shape; otherwise NaN."""
    if tensor.is_transposed or tensor.strides:
        raise SpecError(f"{parameter}: a wrapper gets contiguous tensors; remove .T and --layout")
    dtype = get_format(tensor.fmt).dtype
    # A separate array: the recording distinguishes tensors by their memory.
    values = np.full(tensor.called, np.nan, np.float32).astype(dtype)
    if (known := given.get(tensor.name)) is not None:
        values = known.reshape(tensor.called).copy()
    if torch is None:
        return values
    bits = torch.from_numpy(values.view(f"i{dtype.itemsize}"))
    return bits.view(getattr(torch, tensor.fmt))


@contextlib.contextmanager
def _filled(torch: ModuleType | None) -> Iterator[None]:
    """Fill memory that the wrapper allocates without values with NaN."""

    def filled(function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: object, **how: object) -> object:
            x = function(*args, **how)
            is_float = x.dtype.is_floating_point if torch is not None and hasattr(x, "fill_") else x.dtype.kind == "f"
            if is_float:
                x.fill_(float("nan")) if hasattr(x, "fill_") else x.fill(np.nan)
            return x

        return made

    with contextlib.ExitStack() as stack:
        for owner in (np, torch) if torch is not None else (np,):
            functions = {n: filled(getattr(owner, n)) for n in EMPTY[owner.__name__]}
            stack.enter_context(replaced(owner, **functions))
        yield


def _results(returned: object) -> dict[str, Any]:
    """Return the arrays that a function returned, by name: the names of a mapping, or ``o``, or ``o0``, ``o1``, ... in
    order.
    """
    if isinstance(returned, dict):
        return {str(n): x for n, x in returned.items()}
    if isinstance(returned, tuple | list):
        return {f"o{i}": x for i, x in enumerate(returned) if hasattr(x, "shape")}
    return {"o": returned} if hasattr(returned, "shape") else {}


@dataclass
class _Execution:
    """The launches of a wrapper one after another, from a file of its calls."""

    made: Recorded
    file: Path
    request: Request

    def run(self, *, computes: bool) -> tuple[Storages, dict[str, str], list[str], set[int]]:
        """Return memory after all launches, evidence of arithmetic, notes, and storages that a launch loads before it
        stores.

        ``computes``: whether values are computed; if not, only the positions of stored elements are known.
        """
        memory, evidence, notes, loaded = Storages(self.made.calls, 0), dict[str, str](), list[str](), set[int]()
        for number, call in enumerate(self.made.calls):
            plan, program = program_of(plan_of(self.one(number), is_bare=True))
            views = {t: t.view for t in program.tensors.values() if t.view is not None}
            read = {v.parameter for t, v in views.items() if t.role == "input"} & call.tensors.keys()
            for n in sorted(read):
                x = call.tensors[n]
                loaded |= {x.storage} - memory.writers.keys()
                if computes and not x.is_integer and _is_computed(x, memory, self.made):
                    why = "has NaN that no kernel stored: the wrapper computes it from a kernel's result, or the"
                    raise SpecError(f"{call.where}: {call.name}: {n} {why} kernel loads memory without values")
            if computes:
                BuiltPlan(plan, program).check()
                floats = {n: x for n, x in call.tensors.items() if not x.is_integer}
                memory.store(number, call, program, {n: memory.view(x).copy() for n, x in floats.items()})
                evidence |= arithmetic_evidence(named_choices(program)[0], plan.device)
                notes += program.notes
            written = {v.parameter for t, v in views.items() if t.role == "output"}
            memory.writers |= {call.tensors[n].storage: number for n in written & call.tensors.keys()}
        return memory, evidence, notes, loaded

    def one(self, number: int) -> Request:
        """Return the request for one launch."""
        name = f"{self.file}::{number}"
        alone = replace(self.request, schedule=name, problem=None, tensors=None, workload=None, tiling=None)
        return replace(alone, rows="all", heads="all")

    def results(self, memory: Storages, loaded: set[int]) -> dict[str, Argument]:
        """Return the results by name: the results that the function returned, else the arguments that launches store
        to.

        Arguments that launches also load are results only if all results are such arguments: the kernel then works in
        place.
        """
        stored = {n: x for n, x in self.made.inputs.items() if x.storage in memory.writers}
        alone = {n: x for n, x in stored.items() if x.storage not in loaded}
        found = dict(self.made.results) or alone or stored
        if not found:
            raise SpecError("the wrapper returns no tensor, and its launches store to none of its arguments")
        for n, x in found.items():
            if x.storage not in memory.writers:
                why = "no launch stores it, because kernels do not run while npusim records a wrapper"
                raise SpecError(f"{n}: {why}, so that the values which it computes from their results are unknown")
        return found


def _is_computed(x: Argument, memory: Storages, made: Recorded) -> bool:
    """Return whether an argument has NaN from the recording at elements that no earlier launch has stored."""
    if x.data is None or x.storage in {given.storage for given in made.inputs.values()}:
        return False
    is_lost = np.isnan(np.asarray(x.data).astype(np.float32))
    return bool((is_lost & ~memory.is_written(x)).any())


@contextlib.contextmanager
def _executed(question: Question) -> Iterator[_Execution]:
    made = recorded(question)
    file = Path(f"wrapper-{id(made)}.npz").absolute()
    made.calls.save(file)
    try:
        yield _Execution(made, file, question.request)
    finally:
        file.unlink(missing_ok=True)


def describe(question: Question) -> dict[str, Any]:
    """Return the sizes and formats of a wrapper's inputs and results, in the form of `child.described`."""
    with _executed(question) as execution:
        memory, _, _, loaded = execution.run(computes=False)
        results = execution.results(memory, loaded)
        written = memory.writers.keys() - loaded
        tensors = {n: x for n, x in execution.made.inputs.items() if x.storage not in written}
    named = _names_of_inputs(question)
    inputs = {named.get(n, n): [*four_axes(x.shape), x.fmt] for n, x in tensors.items()}
    (result, first), *others = results.items()
    return {
        "inputs": inputs,
        "output": [*four_axes(first.shape), first.fmt],
        "result": result,
        "others": {n: [*four_axes(x.shape), x.fmt] for n, x in others},
        "tile": {},
        "refused": "",
    }


def _names_of_inputs(question: Question) -> dict[str, str]:
    """Return the names of a wrapper's tensors by parameter; q, k and v of an attention have their own names."""
    request = question.request
    path, text = launch_parts(str(request.schedule))
    _, launch = _called(outside.load(f"{path}:", "a wrapper")[0].__dict__, path, text)
    arguments = _arguments(launch, request.problem if request.problem is not None else request.attention())
    return {n: x.name for n, x in arguments.items() if isinstance(x, Tensor)}


def compute(question: Question, files: Callable[[int], str]) -> dict[str, Any]:
    """Store the results of a wrapper's launches on the tensors of a question, as `child.computed` does."""
    with _executed(question) as execution:
        memory, evidence, notes, loaded = execution.run(computes=True)
        for number, x in enumerate(execution.results(memory, loaded).values()):
            values = bits_of(memory.view(x)).reshape(four_axes(x.shape))
            np.savez(files(number), o=values, computed=np.ones(values.shape[:3], np.bool_))
    return {"file": files(0), "arithmetic": evidence, "notes": list(dict.fromkeys(notes))}


def launches(question: Question) -> Iterator[Request]:
    """Yield the request of each launch of a wrapper, while its file exists."""
    with _executed(question) as execution:
        for number in range(len(execution.made.calls)):
            yield execution.one(number)
