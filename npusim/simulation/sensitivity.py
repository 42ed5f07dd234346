"""How much a predicted latency changes with each assumed or fitted constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.load import reader_of
from npusim.config.node_file import load_machine
from npusim.errors import SpecError
from npusim.kernels.declare.define import machine_of, unread_keys
from npusim.late_methods import dataclass
from npusim.program.ir.walk import Templates
from npusim.program.timing import METHODS
from npusim.simulation.figures import figures
from npusim.simulation.simulate import simulate_program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.config.quantity import Quantity
    from npusim.simulation.run_result import RunData

#: The relative step of a sensitivity table: a fifth up and a fifth down.
STEP = 0.2
#: Constants that affect every run in addition to those in the costs of operations.
GLOBAL_PREFIXES = ("flags.", "launch.", "links.", "memory.l2.")


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Relative change of the latency with one constant a fifth lower and a fifth higher."""

    key: str
    value: float
    basis: str
    lower: float
    higher: float


def sensitivity(result: RunData) -> tuple[Sensitivity, ...]:
    """Return the constants that change the latency, the strongest first.

    Each number of the device file that this run used and whose basis is ``assumed`` or ``fitted`` is changed by a fifth
    in both directions, and the program is timed again.  Integers are rounded.
    """
    if "models" in result.problem.features:
        raise SpecError(
            "sensitivity: not available for a model's layers; use it on their parts: tiling_allreduce, gemm, ..."
        )
    templates = Templates(result.program)

    def row(constant: tuple[str, Quantity]) -> Sensitivity:
        key, fact = constant
        lower, higher = (_change(result, templates, key, fact, factor) for factor in (1 - STEP, 1 + STEP))
        return Sensitivity(key, float(fact.value), fact.basis, lower, higher)

    listed = [one for _, one in figures(_doubtful(result), row, unfit=())]
    return tuple(sorted(listed, key=lambda s: -max(abs(s.lower), abs(s.higher))))


def _doubtful(result: RunData) -> Iterator[tuple[str, Quantity]]:
    used = result.timing.term_cycles if result.timing else {}
    # A route's latency and an engine's queue depth delay results without keeping the engine busy.
    engines = {".".join(key.split(".")[:4]) for key in used}  # cores.<core>.engines.<engine>
    places = {key.rpartition(".")[0] for key in used} | engines
    each = machine_of(result.device).single
    in_node = each is not result.device
    for key, fact in result.device.quantities():
        if not key.startswith("node.") and reader_of(each, key, unread_keys, in_node=in_node) is not None:
            continue
        matters = key.rpartition(".")[0] in places or key.startswith(GLOBAL_PREFIXES)
        if matters and fact.basis in ("assumed", "fitted") and fact.value:
            yield key, fact


def _change(result: RunData, templates: Templates, key: str, fact: Quantity, factor: float) -> float:
    value = fact.value * factor
    text = str(round(value)) if isinstance(fact.value, int) else repr(value)
    if text == str(fact.value):
        return 0.0
    device = load_machine(result.device, {key: text})
    # Simulated with the method of the run, because a difference between methods is not an effect of the constant.
    method = result.timing.method if result.timing and result.timing.method in METHODS else "auto"
    timing = simulate_program(result.program, device, method, templates=templates)
    return timing.latency_s * 1e6 / result.latency_us - 1  # 1e6: seconds to microseconds
