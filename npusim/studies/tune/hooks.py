"""Hooks of Triton's autotuner: `Pruner` and `perf_model` for ``prune_configs_by``.

Triton's ``Autotuner.run`` (3.6 to 3.9) sets ``nargs`` (positional arguments by name) and, for a new key, calls
``early_config_prune(configs, nargs, **kwargs)`` with the launch's grid and constexprs, then ``perf_model`` with the
same arguments and a configuration's values.  Neither receives the kernel.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from npusim.config.problem import KernelProblem
from npusim.errors import NpusimError, SpecError, one_line
from npusim.kernels.triton.compiler import POINTERS
from npusim.kernels.triton.launch import architecture_of, compiled_launch
from npusim.kernels.triton.launch import triton as launch_name
from npusim.kernels.triton.releases import measures_the_only
from npusim.simulation.ranking import Prediction
from npusim.simulation.request import Request
from npusim.studies.tune.configurations import OPTIONS, launch_and_names, values_of, written
from npusim.studies.tune.prediction import Configuration, kept, predict_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: A call, described by the properties on which a prediction depends.
Call = tuple[Any, ...]


class Pruner:
    """An ``early_config_prune`` for ``triton.autotune(..., prune_configs_by={"early_config_prune": ...})``.

    Called by Triton it never raises and never returns an empty list: configurations that npusim cannot predict remain,
    with one warning that states the reason (if ``bits`` is "same" and others are predicted, they are removed, since
    their bits are unknown); configurations that do not fit the device are removed, because Triton would fail on them.

    Parameters
    ----------
    hw
        A device of `npusim hw list`; None: the GPU that torch sees.
    top
        Number of configurations that remain, those with the smallest predicted times.  It is at least 1; a single one
        is not measured.
    bits
        ``any``, or ``same``: all remaining configurations give the same bits for finite inputs, which is proved from
        the structure.

    Raises `SpecError` for other values.

    Examples
    --------
    >>> Pruner("h100", top=2, bits="same").top
    2
    """

    def __init__(self, hw: str | None = None, top: int = 6, bits: str = "any") -> None:
        if top < 1 or bits not in ("any", "same"):
            raise SpecError(f"prune: top={top}, bits={bits!r}; allowed: top from 1, bits any or same")
        self.hw, self.top, self.bits = hw, top, bits
        self._tuner: Any = None
        self._unmeasured: Callable[..., list[float]] | None = None
        self._known: dict[Call, list[Prediction]] = {}
        self._warned: set[str] = set()

    def bind(self, kernel: Any) -> Pruner:
        """Serve an autotuner, or an autotuner below ``@triton.heuristics``; raise `SpecError` if there is none."""
        tuner = kernel
        while tuner is not None and not hasattr(tuner, "early_config_prune"):
            tuner = getattr(tuner, "fn", None)
        if tuner is None:
            raise SpecError(f"bind: {kernel!r} has no @triton.autotune")
        self._tuner, tuner.early_config_prune = tuner, self
        return self

    def __call__(self, configs: Sequence[Any], named_args: dict[str, Any], **kwargs: object) -> list[Any]:
        """Return the remaining configurations, the best first."""
        tuner: Any = self._tuner or sys._getframe(1).f_locals.get("self")
        try:
            left = self._left(tuner, list(configs), named_args, kwargs)
        except Exception as error:  # noqa: BLE001 - nothing of npusim's may end a user's call
            self._warn(f"no configuration is removed: {one_line(error)}")
            return list(configs)
        if self._unmeasured and vars(tuner).get("_bench") is self._unmeasured:
            del tuner._bench  # results of an earlier key, which was not measured
        if len(left) == 1 and hasattr(tuner, "_bench") and measures_the_only():
            # A single configuration is not measured: the function that the autotuner calls for its time answers once.
            self._unmeasured = tuner._bench = lambda *_, **__: vars(tuner).pop("_bench") and [0.0, 0.0, 0.0]
        return left

    def perf_model(self, **everything: object) -> float:
        """Return a configuration's time in us as ``perf_model`` of an autotuner; 0.0 where it is not predicted."""
        tuner: Any = self._tuner or sys._getframe(2).f_locals.get("self")
        try:
            named = dict(tuner.nargs)
            given = [c.all_kwargs() for c in tuner.configs]
            number = next(i for i, g in enumerate(given) if all(everything.get(n) == v for n, v in g.items()))
            rest = {n: v for n, v in everything.items() if n not in named and n not in given[number]}
            prediction = self._predicted(tuner, tuner.configs, named, rest)[number]
        except Exception as error:  # noqa: BLE001 - as above
            self._warn(f"a configuration has no prediction: {one_line(error)}")
            return 0.0
        return prediction.us or 0.0

    def _left(self, tuner: Any, configs: list[Any], named: dict[str, Any], rest: dict[str, Any]) -> list[Any]:
        predictions = self._predicted(tuner, configs, named, rest)
        best = kept(predictions, self.bits)[: self.top]
        if self.bits == "any" and len({predictions[i].key for i in best}) > 1:
            self._warn('the remaining configurations differ in bits; use bits="same" for one class')
        if self.bits == "any" or not best:
            best += [i for i, p in enumerate(predictions) if p.us is None and p.fits]
        return [configs[i] for i in best] or configs

    def _predicted(
        self, tuner: Any, configs: list[Any], named: dict[str, Any], rest: dict[str, Any]
    ) -> list[Prediction]:
        kernel = tuner
        while kernel is not None and not hasattr(kernel, "params"):
            kernel = getattr(kernel, "fn", None)
        if kernel is None:
            raise SpecError("no kernel for these configurations: call bind(kernel) first")
        call = (kernel.__name__, *((n, _described(v)) for n, v in {**named, **rest}.items() if not callable(v)))
        key = (*call, *map(str, configs))
        if key not in self._known:
            hw = self.hw or _device_name()
            listed = [_configuration(kernel, c, named, rest, hw) for c in configs]
            ready = [c for c in listed if isinstance(c, Configuration)]
            _compile(ready)
            predictions = iter(predict_all(ready))
            self._known[key] = [
                next(predictions) if isinstance(c, Configuration) else Prediction(reason=c) for c in listed
            ]
            if unknown := [p.reason for p in self._known[key] if p.us is None and p.fits]:
                self._warn(f"{len(unknown)} of {len(configs)} configurations have no prediction: {unknown[0]}")
        return self._known[key]

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"npusim: {message}", stacklevel=4)


def _device_name() -> str:
    """Return the device file for this process's GPU; raise `SpecError` if there is none."""
    from npusim.config.load import list_devices

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        raise SpecError('no GPU is visible here: name the device, for example hw="h100"')
    called = torch.cuda.get_device_name().lower().replace(" ", "_")
    known = [name for name in list_devices() if name in called]
    if not known:
        raise SpecError(
            f'{torch.cuda.get_device_name()}: npusim has no device file for it; name a device, for example hw="h100"'
        )
    return max(known, key=len)


def _configuration(
    kernel: Any, config: Any, named: dict[str, Any], rest: dict[str, Any], hw: str
) -> Configuration | str:
    """Return a live call with one configuration as the request of a launch, or the reason why no text states
    the call.
    """
    values = {**named, **rest, **config.all_kwargs()}
    if (count := getattr(config, "num_ctas", 1) or 1) != 1 or getattr(config, "maxnreg", None) is not None:
        return f"num_ctas={count}, maxnreg={config.maxnreg}: allowed: 1 and none"
    grid = rest["grid"](values) if callable(rest["grid"]) else rest["grid"]
    try:
        given = {p.name: _written(p.name, values[p.name]) for p in kernel.params if p.name in values}
    except SpecError as error:
        return one_line(error)
    launch = f"[{', '.join(map(str, grid))}]({', '.join(f'{n}={v}' for n, v in given.items())})"
    tiling = {"warps": config.num_warps, "stages": config.num_stages}
    name = launch_name(kernel, launch)
    request = Request(name, hw=hw, tiling=tiling, problem=KernelProblem.of(None), l2="steady", numerics=False)
    return Configuration(values_of(config), request, written(values_of(config)))


def _compile(listed: Sequence[Configuration]) -> None:
    """Compile launches concurrently, where possible; Triton then reads the results from its cache.

    In threads: the compiler releases the interpreter's lock, and a user's script need not be safe to import again.
    """

    def made(configuration: Configuration) -> None:
        request, tiling = configuration.request, dict(configuration.request.tiling or {})
        options = {name: int(str(tiling[field])) for name, field in OPTIONS.items()}
        with suppress(NpusimError):  # the error is reported when the configuration is predicted
            architecture = architecture_of(request.machine())
            compiled_launch(*launch_and_names(request.schedule, request.problem), options, architecture)

    for configuration in listed[:1]:  # reads the kernel's file
        made(configuration)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        deque(pool.map(made, listed[1:]), 0)


def _described(value: Any) -> Any:
    """Return the properties of an argument on which a prediction depends."""
    is_tensor = hasattr(value, "stride") and hasattr(value, "dtype")
    return (tuple(value.shape), tuple(value.stride()), str(value.dtype)) if is_tensor else repr(value)


def _written(name: str, value: Any) -> str:
    """Return an argument of a live call in the text of a launch; raise `SpecError` if no text can state it."""
    if not hasattr(value, "stride"):
        return repr(value)
    shape, fmt, strides = list(value.shape), str(value.dtype).removeprefix("torch."), tuple(value.stride())
    if not value.is_contiguous():
        if len(shape) != 2 or strides != (1, shape[0]):
            raise SpecError(f"{name}: strides {strides} of a tensor of {tuple(shape)}: allowed: contiguous, or its .T")
        shape = shape[::-1]
    if fmt not in POINTERS:
        raise SpecError(f"{name}: a tensor of {fmt}; allowed: {', '.join(POINTERS)}")
    return f"tensor({', '.join(map(str, shape))}).to({fmt!r})"


def perf_model(hw: str | None = None) -> Callable[..., float]:
    """Return a ``perf_model`` for ``prune_configs_by={"perf_model": ..., "top_k": ...}``: predicted time of the cores
    in us.

    ``hw`` as in `Pruner`.  A configuration that is not predicted has 0.0, so that it is measured.
    """
    return Pruner(hw).perf_model


class TritonKernels:
    """Name launches of Triton kernels for the verbs of npusim, and prune the autotuner's configurations.

    ``npusim.triton(kernel, launch)`` returns the text that `npusim.run`, `npusim.explore` and the other verbs accept as
    their schedule.  ``kernel`` is a function under ``@triton.jit`` in a file, or ``"FILE.py::name"``; ``launch`` is
    its grid and arguments as text, ``"[grid](arguments)"``, in names of the problem: sizes (``batch``, ``heads``,
    ``seq_q``, ``head_dim``, ...), the tensors ``q``, ``k``, ``v`` and ``o`` of shape (batch, heads, rows, head_dim),
    and ``tensor(rows, columns)`` for any other.

    ``npusim.triton.prune(hw, top=...)`` is an ``early_config_prune`` and ``npusim.triton.perf_model(hw)`` a
    ``perf_model`` for ``triton.autotune(prune_configs_by=...)``: both predict on ``hw`` the time of every
    configuration, so that only the fastest are measured.

    Examples
    --------
    >>> import npusim
    >>> npusim.triton("softmax.py::softmax", "[rows](tensor(rows, 1024), tensor(rows, 1024), 1024, B=1024)")
    'softmax.py::softmax[rows](tensor(rows, 1024), tensor(rows, 1024), 1024, B=1024)'
    """

    __call__ = staticmethod(launch_name)
    prune = staticmethod(Pruner)
    perf_model = staticmethod(perf_model)


#: The object that users call ``npusim.triton``.
triton = TritonKernels()
