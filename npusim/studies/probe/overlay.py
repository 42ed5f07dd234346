"""The keys of a device file that a chip's outputs determine: all identified units, and the file that extends the
device's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.formats import get_arithmetic
from npusim.studies.probe.decide import Answer, Identified, goes_on, identify_product
from npusim.studies.probe.questions import LONG_K, ProbeCase
from npusim.studies.probe.vector import OperationResult, identify_operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from npusim.config.device import DeviceSpec
    from npusim.studies.probe.files import Outputs


@dataclass(frozen=True)
class Settled:
    """The identified units of a chip: products by case, with the order of longer products, and operations of its vector
    core.
    """

    products: Mapping[str, tuple[Identified, Answer | None]]
    operations: Mapping[str, OperationResult]

    @property
    def is_explained(self) -> bool:
        """Whether some unit explains every output of every product; tables of operations do not count as faults."""
        return all(
            one.name is not None and not (long and long.explained < long.asked) for one, long in self.products.values()
        )


def identify(outputs: Outputs, device: DeviceSpec | None = None, on_case: Callable[[str], object] = str) -> Settled:
    """Return the units that explain a chip's outputs; ``on_case`` is called with each case as it begins."""
    choices = [] if device is None else [str(choice.value) for choice in device.arithmetic_choices.values()]
    stated = {_formats(name): name for name in choices}
    units = {} if device is None else device.matrix_engines
    instruction = "wgmma" if any(getattr(unit, "wgmma", None) for unit in units.values()) else ""
    products, operations = {}, {}
    for key, (p, d) in outputs.products.items():
        case = ProbeCase.of(key)
        if case.depth == LONG_K:
            continue
        on_case(key)
        a, b, acc = case.formats
        one = identify_product(p, d, stated.get((a.name, b.name, acc.name), ""), instruction)
        long = outputs.products.get(ProbeCase(case.name, LONG_K).key)
        products[key] = one, goes_on(one, *long) if long and one.unit else None
    for key, (operation, given, result) in outputs.vector.items():
        on_case(key)
        operations[key] = identify_operation(key, operation, given, result)
    return Settled(products, operations)


def _formats(name: object) -> tuple[str, str, str]:
    u = get_arithmetic(str(name))
    return u.a_format, u.b_format, u.acc_format


def settled_keys(settled: Settled, device: DeviceSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a device's file that the outputs determine, with their values and the number of outputs.

    A product that was probed with C and without has the answer with C; the source states a difference.
    """
    by_key: dict[tuple[str, str, str], list[Identified]] = {}
    for one, _ in sorted(settled.products.values(), key=lambda pair: not pair[0].case.has_c):
        if one.name is not None:
            by_key.setdefault(_formats(one.name), []).append(one)
    for key, choice in device.arithmetic_choices.items():
        if first := by_key.get(_formats(choice.value)):
            one, count = first[0], f"{first[0].explained:,} of {first[0].asked:,} outputs explained"
            for other in first[1:]:
                if one.name not in (other.name, *other.registered):
                    count += f"; those of {other.case.name} are explained by another unit: {other.name}"
            yield key, str(one.name), count
    for key, _ in device.facts():
        if key.startswith("facts.") or (name := key.rpartition(".")[2]) not in _VECTOR_KEYS:
            continue
        prefix, values = _VECTOR_KEYS[name]
        operations = [o for k, o in settled.operations.items() if k.startswith(prefix)]
        answers = [{answer.partition(", overflow")[0] for answer in o.answers} for o in operations]
        known = values or {order: order for order in device.row_sums}
        common = [value for words, value in known.items() if answers and all(words in a for a in answers)]
        if len(common) == 1:
            yield key, common[0], f"{sum(o.asked for o in operations):,} results explained"


#: Keys of a vector unit, the operations that determine them, and their values by answer (empty: the answers
#: themselves).
_VECTOR_KEYS: Mapping[str, tuple[str, dict[str, str]]] = MappingProxyType(
    {
        "row_sum": ("sum.", {}),
        "cast_rounding": ("cast.float16", {"nearest_even": "nearest_even", "nearest_away": "nearest_away"}),
        "multiply_add": ("fma.", {"one rounding": "once", "two roundings": "twice"}),
    }
)


def overlay_text(
    keys: Iterable[tuple[str, str, str]], outputs: Outputs, device: DeviceSpec, extends: str, name: str
) -> str:
    """Return the device file that extends ``extends`` with the determined ``keys``."""
    about = f"{device.name}, its arithmetic as probed"
    lines = ["schema: npusim.device/1", f"extends: {json.dumps(extends)}", f"name: {name}"]
    lines += [f"description: {json.dumps(about)}", ""]
    for key, value, count in keys:
        source = f"npusim probe identify: {count}; {outputs.source}"
        lines.append(f"{key}: {json.dumps({'value': value, 'basis': 'measured', 'source': source})}")
    return "\n".join([*lines, ""])
