"""Source text of kernels with states, drawn: products with states, transposes, results by tile, a loop behind it."""

from __future__ import annotations

import random
from typing import Any

from npusim.kernel import GlobalTensor, Stacked, TileRun, WorkTile
from npusim.units import ceil_div, chunks
from tests.algorithms.drawn import NAMES, shuffled

F = "float32"
#: Operands in the order of the function; rows read ``x`` and ``u``, products K and V: a load serves one of the two.
AXES = {
    "q": "row key", "k": "token key", "v": "token value", "x": "token key", "u": "token value",
    "end": "key", "decay": "row token", "out": "row",
}  # fmt: skip

#: Operands of which every tile reads the same, from the first row or column on.
STILL = {"decay", "out"}


class DrawnStates:
    """One kernel with its sizes, its blocks and its tensors."""

    def __init__(self, number: int) -> None:
        self.number, self.draw = number, random.Random(number)
        d = self.draw
        self.fmt = d.choice(["float16", "float16", "bfloat16"])
        self.chunk, self.key, self.heads = d.choice([32, 32, 64]), d.choice([32, 32, 64]), d.choice([1, 2])
        self.value, self.width = d.choice([(32, 32), (48, 32), (64, 32), (64, 64)])
        self.tokens = d.randint(1, 4 * self.chunk) if d.random() < 0.5 else self.chunk * d.randint(1, 4)
        self.results: dict[str, str] = {}  # axes by name, in the order in which they are made
        self.source = self._source()

    def _maybe(self, share: float = 0.5) -> bool:
        return self.draw.random() < share

    def _source(self) -> str:
        d = self.draw
        body, (fed, fed_lines) = [f"h = s.to({self.fmt!r})", *self._result()], self._fed()
        second, starts = self._second()
        kept = d.choice(["s", "s * 0.5", "s * endj"])
        step = f"(kj.T @ {fed}).to(F)"
        ends = ["g = " + step, f"s = {kept} + g"] if self._maybe(0.3) else [f"s = {kept} + {step}"]
        lines = shuffled(d, body + fed_lines + second) + self._yields() + ends
        finish = self._finish(bool(second))
        read = set(NAMES.findall("\n".join(lines)))
        walked = [n for n in AXES if f"{n}j" in read]
        still = [n for n in AXES if n in STILL & read]
        self.operands = walked + still
        axes = ", ".join(f"{n}={AXES[n]!r}" for n in self.operands)
        start = d.choice([0.0, 0.0, 0.5])
        text = [
            f"F, fmt = {F!r}, {self.fmt!r}",
            f"@kernel(results={' '.join(self.results)!r}, {axes}, walks='row token', still={' '.join(still)!r})",
            f"def drawn({', '.join(self.operands)}):",
            *(f"    {x}" for x in shuffled(d, [f"s = full('key value', {start}, F)", *starts])),
            f"    for {', '.join(f'{n}j' for n in walked)} in tiles({', '.join(walked)}):",
            *(f"        {x}" for x in lines),
            *(f"    {x}" for x in finish),
        ]
        return "\n".join(text) + "\n"

    def _result(self) -> list[str]:
        """Rows of a chunk: of the state, of the chunk's own scores, or of both, in one accumulator or two."""
        d = self.draw
        inter = "(qj @ h).to(F)" + (" * out" if self._maybe(0.25) else "")
        if self._maybe():
            return [f"y = {inter}"]
        scored = "(qj @ kj.T).to(F)" + (" * decay" if self._maybe(0.4) else "")
        scored += d.choice(["", "", " * 0.25"])
        if self._maybe(0.2):
            scored = f"maximum({scored}, 0.0)"
        weights = [f"a = {scored}", "w = a.to(fmt)"] if self._maybe() else [f"w = ({scored}).to(fmt)"]
        if self._maybe(0.35):
            return [*weights, f"y = ({d.choice(['w @ vj + qj @ h', 'qj @ h + w @ vj'])}).to(F)"]
        if self._maybe(0.3):
            return [*weights, f"i = {inter}", "y = i + (w @ vj).to(F)"]
        return [*weights, f"y = (w @ vj).to(F) + {inter}"]

    def _fed(self) -> tuple[str, list[str]]:
        """The right factor of what goes into the state: an operand, made of one, or of the state (a delta rule)."""
        return self.draw.choice([
            *[("vj", [])] * 3,
            ("fed", ["fed = (uj.to(F) * 0.5).to(fmt)"]),
            ("fed", ["l = s.to(fmt)", "r = uj.to(F) - (kj @ l).to(F)", "fed = r.to(fmt)"]),
            ("fed", ["l = s.to(fmt)", "fed = (uj.to(F) - (kj @ l).to(F)).to(fmt)"]),
        ])  # fmt: skip

    def _second(self) -> tuple[list[str], list[str]]:
        """A second state: a matrix of transposed factors, a number for each channel of keys, or none."""
        tile, vector = "z = full('value key', 0.0, F)", "z = full('key', 1.0, F)"
        lines, start = self.draw.choice([
            *[([], "")] * 10,
            (["z = z + (vj.T @ kj).to(F)"], tile),
            (["n = (xj + xj).to(fmt)", "z = z * 0.5 + (vj.T @ n).to(F)"], tile),
            (["n = (uj + uj).to(fmt)", "z = z + (n.T @ kj).to(F)"], tile),
            (["z = maximum(z, s.max())"], vector),
            (["z = z + s.sum()"], vector),
        ])  # fmt: skip
        if start == vector:
            self.width = self.value  # else blocks beside one another would leave one result
        self.second = "key" if start == vector else "value key"
        return lines, [start] if start else []

    def _yields(self) -> list[str]:
        """What each tile leaves: rows, and perhaps the state before it, as it is or through a product."""
        self.results["o"] = "row value"
        if self._maybe(0.2):
            self.results["b"] = "key value"
            return ["c = s.to(fmt)", "yield y.to(fmt), c"]
        if self._maybe(0.2):
            self.results["b"] = "value row"
            return ["t = (s.to(fmt).T @ qj.T).to(F).to(fmt)", "yield y.to(fmt), t"]
        return ["yield y.to(fmt)"]

    def _finish(self, has_second: bool) -> list[str]:
        """What is left behind the loop: rows of a second loop that reads the last state, and states."""
        lines, returned = list[str](), list[str]()
        if self._maybe(0.15):
            lines += ["for qj in tiles(q):", "    e = s.to(fmt)", "    yield (qj @ e).to(F).to(fmt)"]
            self.results["o2"] = "row value"
        if self._maybe(0.3):
            returned.append("s.to(fmt)")
            self.results["last"] = "key value"
        if has_second:
            returned.append("z")
            self.results["z"] = self.second
        return lines + ([f"return {', '.join(returned)}"] if returned else [])

    # ------------------------------------------------------------ sizes

    @property
    def sizes(self) -> dict[str, int]:
        """The largest span of each axis in a block."""
        return {"row": self.chunk, "token": self.chunk, "key": self.key, "value": self.width}

    @property
    def count(self) -> int:
        """Tiles of a block."""
        return ceil_div(self.tokens, self.chunk)

    def blocks(self) -> tuple[WorkTile, ...]:
        """Return a block for each head and each width of values."""
        whole, rest = divmod(self.tokens, self.chunk)
        runs = (TileRun(0, self.chunk, whole, self.chunk),) * (whole > 0)
        runs += (TileRun(whole * self.chunk, rest, 1, rest),) * (rest > 0)
        return tuple(
            WorkTile(0, h, (("key", 0, self.key), ("value", at, n)), runs)
            for h in range(self.heads)
            for at, n in chunks(self.value, self.width)
        )

    def tensor(self, name: str) -> GlobalTensor | Stacked:
        """Return the tensor of an operand or a result: of all tokens, of a chunk, or a stack of a matrix for each."""
        is_result = name in self.results
        axes = [*(self.results if is_result else AXES)[name].split(), ""]
        long = self.chunk if name in ("decay", "out", "b") else self.tokens
        size = {"row": long, "token": long, "key": self.key, "value": self.value, "": 1}
        is_stacked, fmt = name in ("b", "end"), F if name in ("decay", "out", "end", "z") else self.fmt
        batch: Any = self.count if is_stacked else 1
        role: Any = "output" if is_result else "input"
        found = GlobalTensor(name, batch, self.heads, size[axes[0]], size[axes[1]], fmt, role)
        return Stacked("chunk", self.count, found) if is_stacked else found
