"""Configurations to try: from a kernel's `@triton.autotune` and `@triton.heuristics`, or from given fields.

A recorded call (``calls.npz::k``) has the configurations of its autotuner, by number.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.config.tiling import build_tiling, with_own_names
from npusim.errors import SpecError, one_line
from npusim.kernels.triton import is_recorded, launch_parts
from npusim.kernels.triton.calls import call_of
from npusim.kernels.triton.compiler import DEFAULTS, decorators_of
from npusim.kernels.triton.compiler import OPTIONS as COMPILED
from npusim.kernels.triton.launch import architecture_of, arguments_of, launch_of, names_of
from npusim.studies.tune.prediction import Configuration

if TYPE_CHECKING:
    from npusim.kernels.triton.launch import Launch
    from npusim.simulation.request import Request

#: Options of a configuration other than constexprs: tiling fields, by Triton's name.
OPTIONS: Mapping[str, str] = MappingProxyType({"num_warps": "warps", "num_stages": "stages"})
_NAMES: Mapping[str, str] = MappingProxyType({field: name for name, field in OPTIONS.items()})


def configurations_of(request: Request, axes: Mapping[str, Iterable[Any]]) -> list[Configuration]:
    """Return the configurations of a request: every combination of ``axes``, else the configurations of the kernel's
    decorator.

    Raises `SpecError` if there are neither, or if the decorator cannot be evaluated.
    """
    named, points = dict(request.tiling or {}), [dict(zip(axes, p, strict=True)) for p in product(*axes.values())]
    if not axes and is_recorded(request.schedule):
        call = call_of(str(request.schedule))
        recorded = call.configurations
        if len(recorded) == 1:
            raise SpecError(f"{request.schedule}: its kernel has no autotuner; use -f FIELD=VALUES")
        return [
            Configuration(
                {"config": i, **c.values},
                replace(request, tiling={**named, "config": i}),
                # configurations of TileLang are mappings
                repr(dict(c.constants)) if call.language else written(c.values),
            )
            for i, c in enumerate(recorded)
        ]
    path, launch = launch_parts(request.schedule)
    is_written = request.is_launch and path.endswith(".py")
    if axes and not is_written:
        kind = request.find_schedule().tiling
        build_tiling(kind, dict.fromkeys(axes, "auto"))  # refuses unknown fields
        return [Configuration(p, replace(request, tiling={**named, **with_own_names(kind, p)})) for p in points]
    if not axes and not request.is_launch:
        how = f"-f FIELD=VALUES (npusim run {request.schedule} --fields lists the fields)"
        raise SpecError(f"{request.schedule}: a schedule has no list of configurations; name fields to rank: {how}")
    if not axes and (not is_written or ";" in launch):
        raise SpecError(f"{request.schedule}: there is no @triton.autotune with configurations; use -f FIELD=VALUES")
    kernel = path, launch.partition("[")[0].strip()
    architecture = architecture_of(request.machine())
    if not axes:
        points = [values_of(c) for listed in decorators_of(*kernel, "autotune", architecture) for c in listed]
        if not points:
            raise SpecError(f"{request.schedule}: its kernel has no @triton.autotune; use -f FIELD=VALUES")
    heuristics = {n: f for given in decorators_of(*kernel, "heuristics", architecture) for n, f in given.items()}
    others = {n: f for n, f in heuristics.items() if n not in axes}
    return [_launched(Configuration({}, request), p, others) for p in points]


def values_of(config: Any) -> dict[str, Any]:
    """Return a ``triton.Config``'s values by Triton's names, without options that state a default."""
    options = {n: v for n, v in config.all_kwargs().items() if n not in config.kwargs}
    return {**config.kwargs, **{n: v for n, v in options.items() if v != DEFAULTS.get(n, ...)}}


def written(values: Mapping[str, Any]) -> str:
    """Return the line of a decorator that has a configuration's values.

    >>> written({"BM": 64, "num_warps": 8})
    "triton.Config({'BM': 64}, num_warps=8)"
    """
    options = {n: v for n, v in values.items() if n in COMPILED}
    constants = {n: v for n, v in values.items() if n not in options}
    return f"triton.Config({', '.join([repr(constants), *(f'{n}={v!r}' for n, v in options.items())])})"


def _call(launch: str) -> ast.Call:
    """Return the expression of a launch's text; raise `SpecError` for a text that is not a launch."""
    try:
        call = ast.parse(launch.strip(), mode="eval").body
    except SyntaxError as error:
        raise SpecError(f"{launch}: {error.msg}") from None
    if not isinstance(call, ast.Call):
        raise SpecError(f"{launch}: a launch is name[grid](arguments)")
    return call


def _options_of(launch: str) -> dict[str, Any]:
    """Return the warps and stages that a launch's text states."""
    stated = {k.arg: k.value for k in _call(launch).keywords if k.arg in OPTIONS}
    return {str(n): x.value for n, x in stated.items() if isinstance(x, ast.Constant)}


def _with(launch: str, constants: Mapping[str, Any]) -> str:
    """Return a launch's text with other values of keywords; an option that is not a parameter is refused when it is
    read.
    """
    call = _call(launch)
    call.keywords = [k for k in call.keywords if k.arg not in constants]
    call.keywords += [ast.keyword(n, ast.Constant(v)) for n, v in constants.items()]
    return ast.unparse(call)


def _launched(base: Configuration, values: Mapping[str, Any], heuristics: Mapping[str, Any]) -> Configuration:
    """Return a launch with other values of some arguments."""
    request = base.request
    values, named = ({_NAMES.get(n, n): v for n, v in given.items()} for given in (values, dict(request.tiling or {})))
    constants = {n: v for n, v in values.items() if n not in OPTIONS}
    tiling = {**named, **{n: v for n, v in values.items() if n in OPTIONS}}
    path, launch = launch_parts(request.schedule)
    stated = {**_options_of(launch), **values, **{n: v for n, v in tiling.items() if n in OPTIONS}}
    if heuristics:
        trial = f"{path}::{_with(launch, {**dict.fromkeys(heuristics, 0), **constants})}"
        constants |= _worked_out(trial, request.problem, heuristics)
    request = replace(request, schedule=f"{path}::{_with(launch, constants)}", tiling=tiling)
    return Configuration(values, request, written(stated))


def _worked_out(name: str, problem: object, heuristics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of heuristics for a launch's arguments, numbers and tensors by parameter."""
    launch, names = launch_and_names(name, problem)
    arguments = {**arguments_of(launch, names), **launch.options}
    worked = dict[str, Any]()
    for parameter, function in heuristics.items():
        try:
            worked[parameter] = function({**arguments, **worked})
        except Exception as error:  # noqa: BLE001 - a user's function, whatever it raises
            why = f"{parameter}: {one_line(error)}; set its value in the launch, and use -f"
            raise SpecError(f"{launch.source.path}: @triton.heuristics: {why}") from None
    return worked


def launch_and_names(name: str, problem: object) -> tuple[Launch, dict[str, Any]]:
    """Return the launch of ``kernel.py::name[grid](arguments)``, and the names that its expressions may use."""
    path, text = launch_parts(name)
    file = Path(path).resolve()
    launch = launch_of(text, str(file), file.stat().st_mtime_ns)
    return launch, {**names_of(problem), **dict(launch.constants)}
