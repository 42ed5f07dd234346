"""Names of a run: its inputs, its folder, and the digest of everything that affects the prediction."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from npusim.config.tiling import build_tiling

if TYPE_CHECKING:
    from npusim.simulation.plan import Plan

#: Options that the name of a run's folder contains, and options that change only the display of the run.
IN_FOLDER_NAMES = frozenset(
    ("workload", "seq", "seq_q", "seq_kv", "phase", "problem", "hw", "diagnose", "presets", "trace_groups", "timeline")
)
#: Largest number of bytes of a folder's name before its digest: file systems have 255 at most.
LONGEST_FOLDER = 200


def inputs_of(plan: Plan) -> str:
    """Return the name of the inputs for the record."""
    drawn = plan.problem.drawn
    return _given_or_drawn(plan) + (f"; drawn: {', '.join(drawn)}" if drawn else "")


def _given_or_drawn(plan: Plan) -> str:
    tensors = plan.request.tensors
    if tensors is not None:
        return str(tensors) if isinstance(tensors, str | Path) else "arrays given"
    return plan.problem.recipe


def digest_of(plan: Plan) -> str:
    """Return a hash of everything that affects the prediction: two runs with the same digest are the same run.

    It covers the resolved request, the contents of the device, of a user's schedule and of tensors, and the rows
    whose bits are computed; not npusim itself, and no options of display.
    """
    r, content = plan.request, sha256()
    bits = (repr(r.rows), repr(r.heads), *filter(None, [r.padding])) if r.numerics else None
    # the other arguments follow from it
    named = build_tiling(plan.schedule.tiling, r.chosen_tiling(plan.schedule.tiling))
    sizes, tiling = (x.model_dump_json() for x in (plan.problem, named))
    names = sorted(named.model_fields_set) if plan.is_open else ()
    run = (r.schedule, plan.device.digest(), repr(plan.precision), type(plan.problem).__name__, sizes, tiling, names)
    content.update(repr((*run, r.title(plan.workload), r.method, r.l2, bits, plan.ignored)).encode())
    if (source := Path(plan.schedule.origin.rpartition(":")[0])).is_file():
        content.update(source.read_bytes())
    for name, array in sorted({**(plan.tensors or {}), "w_o": plan.projection}.items()):
        if array is not None:
            content.update(repr((name, array.shape, array.dtype)).encode() + array.tobytes())
    return content.hexdigest()[:12]


def sizes_of(plan: Plan) -> str:
    """Return the integers of a problem that differ from their defaults, each after its name."""
    sizes, usual = plan.problem.model_dump(exclude_defaults=True), plan.schedule.sizes
    return "".join(f"{name}{size}" for name, size in sizes.items() if isinstance(size, int) and size != usual.get(name))


def folder_of(plan: Plan) -> str:
    """Return the name of the run's folder: schedule, inputs, shape, device, and a digest of the other options."""
    r = plan.request
    shape = plan.problem.folder(r.title(plan.workload)) or sizes_of(plan)
    name = "_".join("-".join(filter(None, (plan.schedule.name, shape, plan.device.name))).split())
    are_packaged = all(x is None or (isinstance(x, str) and not Path(x).suffix) for x in (r.workload, r.hw))
    is_all = are_packaged and not plan.schedule.origin and r.changed().keys() <= IN_FOLDER_NAMES
    if is_all and len(name.encode()) <= LONGEST_FOLDER:
        return name
    return f"{name.encode()[:LONGEST_FOLDER].decode(errors='ignore')}-{digest_of(plan)[:6]}"
