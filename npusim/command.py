"""The command line that asks for a run: so that advice starts from the very run it is about."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.spec.kernels import CopyProblem, GemmProblem
from npusim.spec.tiling import Tiling

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Asked", "asked", "command"]

#: Options with their values, in the order of the command line; a flag has no value.
Asked = tuple[tuple[str, str], ...]

_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "workload": "-w", "problem": "--problem", "seq": "--seq", "seq_q": "--seq-q", "seq_kv": "--seq-kv",
        "batch": "--batch", "tensor_parallel": "--tp", "dtype": "--dtype", "hw": "--hw",
        "precision": "--precision", "method": "--method",
    }
)  # fmt: skip


def asked(defaults: Mapping[str, object], options: Mapping[str, Any]) -> Asked | None:
    """Return options of `npusim.run` (those that say what is run, not what is shown) as a command line.

    None where a command line could not say it: a problem or a device made in Python.
    """
    found: list[tuple[str, str]] = []
    for name, value in options.items():
        if value is None or value == defaults.get(name):
            continue
        if name == "causal":
            found.append(("--causal" if value else "--no-causal", ""))
        elif name in ("tiling", "overrides"):
            fields = value.model_dump(exclude_unset=True) if isinstance(value, Tiling) else value
            option = "-t" if name == "tiling" else "-C"
            found += [(option, f"{key}={item}") for key, item in fields.items()]
        elif name == "ignore":
            found.append(("--ignore", ",".join(value)))
        elif isinstance(value, GemmProblem | CopyProblem):
            sizes = ",".join(f"{key}={item}" for key, item in value.model_dump().items())
            found.append(("--problem", sizes))
        elif isinstance(value, str | int | Path):
            found.append((_OPTIONS[name], str(value)))
        else:
            return None
    return tuple(found)


def command(verb: str, schedule: str, options: Iterable[tuple[str, str]], more: Iterable[str]) -> str:
    """Return ``npusim <verb> <schedule> ...`` as a shell takes it."""
    words = ["npusim", verb, schedule]
    for option, value in options:
        words += [option, value] if value else [option]
    return " ".join(shlex.quote(word) for word in (*words, *more))
