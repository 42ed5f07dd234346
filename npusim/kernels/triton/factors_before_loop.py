"""Left factors that a kernel computes before its loop; if cores cannot store them, a separate phase computes them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.kernels.form.phase import WorkTile
from npusim.kernels.triton.values import Floats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npusim.kernels.form.lowering import Kernel
    from npusim.kernels.form.phase import Phase
    from npusim.kernels.triton.launch_phases import Written
    from npusim.kernels.triton.reader import Reader
    from npusim.kernels.triton.ttir_text import Line
    from npusim.program.ir.tile import GlobalTensor


class Prelude(NamedTuple):
    """A value computed before the loop: its name and format, the load from which it is computed, and the statements."""

    name: str
    fmt: str
    load: str
    lines: tuple[tuple[str, Line], ...]


def prelude_of(reader: Reader) -> Prelude | None:
    """Return the left factor that a kernel computes from one operand before its loop, for products in the loop; None if
    there is no such factor.
    """
    before = reader.lines[: reader.walks[0].at] if reader.walks else []
    result = {text.partition(" = ")[0]: (text, line) for text, line in before}
    inside = [text for walk in reader.walks for text, _ in walk.lines]
    factors = {name for text in inside for name in re.findall(r"\((\w+) @ ", text)}
    names, needed = [n for n in result if n in factors], set[str]()
    if len(names) != 1:
        return None
    todo = list(names)
    while todo:
        needed.add(name := todo.pop())
        words = _words(result[name][0].partition(" = ")[2])
        todo += [n for n in words if n in result and n not in needed]
        needed |= {n for n in words if n in reader.loads}
    loads = [n for n in needed if n in reader.loads]
    value = next(x for x in reader.values.values() if isinstance(x, Floats) and x.text == names[0])
    others = [text for text, _ in reader.lines if text.partition(" = ")[0] not in needed] + inside
    others += [reader.text(x.value) for x in reader.stored if not x.is_walked]
    is_apart = not any(n in needed - {names[0]} for text in others for n in _words(text))
    if len(loads) != 1 or reader.loads[loads[0]].is_walked or not is_apart:
        return None
    lines = tuple(result[n] for n in result if n in needed)
    return Prelude(names[0], reader.choices.fmt(value.fmt), loads[0], lines)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", text)


def phase_before(
    prelude: Prelude,
    like: Written,
    kernel_of: Callable[[Written], Kernel],
    axes: str,
    cells: Sequence[WorkTile],
    sizes: Mapping[str, int],
    **bound: Any,
) -> tuple[Phase, GlobalTensor]:
    """Return the phase that computes a factor for the blocks of the main phase, and the tensor of the factor.

    ``like``: the main kernel's text; ``kernel_of`` compiles such a text; ``axes``: axes of the factor's source;
    ``bound``: the tensor of the source, the precision and numbers by name.
    """
    name, source = f"{like.name}_{prelude.name}", bound[prelude.load]
    lines = [(f"def {name}({', '.join(n for n in bound if n != 'p')}):", prelude.lines[0][1].number)]
    lines += [(f"    {text}", line.number) for text, line in prelude.lines]
    lines.append((f"    return {prelude.name}", prelude.lines[-1][1].number))
    text, at = "\n".join(text for text, _ in lines), tuple(n for _, n in lines)
    written = like._replace(name=name, source=text, axes=((prelude.load, axes),), lines=at, results="out")
    tensor = replace(source, name=prelude.name, fmt=prelude.fmt, role="workspace", view=None)
    own = tuple(dict.fromkeys(WorkTile(c.batch, c.head, c.spans[:1]) for c in cells))
    phase = kernel_of(written).phase(name, own, sizes, [tensor], **bound)
    return replace(phase, flops=0, is_named=True), tensor
