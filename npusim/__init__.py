"""npusim: which bits and how many cycles an attention schedule gives on NPUs and GPUs.

``run`` executes one schedule for its values and simulates it for its time; ``compare`` and ``explore`` build on it; all
errors are `NpusimError`.  Submodules for direct use: ``formats`` (numbers), ``errors``. Importing npusim imports
neither numpy nor a simulator; names are loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npusim import errors, formats
    from npusim.errors import NpusimError
    from npusim.kernels.tilelang.recording import record
    from npusim.report.compared_runs import compare
    from npusim.run import RunResult, run, run_calls
    from npusim.studies.evaluate import evaluate
    from npusim.studies.explore import explore
    from npusim.studies.invariance import invariant
    from npusim.studies.stress import stress
    from npusim.studies.tune.hooks import triton

__all__ = [
    "NpusimError",
    "RunResult",
    "__version__",
    "compare",
    "errors",
    "evaluate",
    "explore",
    "formats",
    "invariant",
    "record",
    "run",
    "run_calls",
    "stress",
    "triton",
]

__version__ = "0.2.0"

#: Public functions and classes by the module that defines them; public submodules name themselves.
_HOMES = MappingProxyType(
    {
        "NpusimError": "npusim.errors",
        "RunResult": "npusim.run",
        "compare": "npusim.report.compared_runs",
        "errors": "npusim.errors",
        "evaluate": "npusim.studies.evaluate",
        "explore": "npusim.studies.explore",
        "formats": "npusim.formats",
        "invariant": "npusim.studies.invariance",
        "record": "npusim.kernels.tilelang.recording",
        "run": "npusim.run",
        "run_calls": "npusim.run",
        "stress": "npusim.studies.stress",
        "triton": "npusim.studies.tune.hooks",
    }
)
_SUBMODULES = frozenset({"errors", "formats"})


class _Package(ModuleType):
    """Module type that loads public names on first use; if a submodule has the name of a function, the name remains the
    function.

    The import system binds ``npusim.run`` to the module of that name as soon as anyone imports it;
    users mean the function.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'npusim' has no attribute {name!r}")
        module = importlib.import_module(_HOMES[name])
        value = module if name in _SUBMODULES else getattr(module, name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in _HOMES and name not in _SUBMODULES:
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(__all__)


sys.modules[__name__].__class__ = _Package
