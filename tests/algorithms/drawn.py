"""Source text of attention-like kernels, drawn: formats, steps, states, and the order of what does not depend."""

from __future__ import annotations

import random
import re
from typing import Any

from npusim.kernel import FlashPrecision, Problem

F, LOG2_E = "float32", float.fromhex("0x1.71547652b82fep+0")
NAMES = re.compile(r"[A-Za-z_]\w*")


def shuffled(draw: random.Random, lines: list[str]) -> list[str]:
    """Return the lines in another order in which each still reads what it read."""
    made = [re.match(r"(\w+) = ", line)[1] for line in lines]  # type: ignore[index]
    read = [set(NAMES.findall(line.split(" = ", 1)[1])) for line in lines]
    after = [
        {i for i in range(j) if made[i] in read[j] or made[j] in read[i] or made[i] == made[j]}
        for j in range(len(lines))
    ]
    order: list[int] = []
    while len(order) < len(lines):
        order.append(draw.choice([j for j in range(len(lines)) if j not in order and after[j] <= set(order)]))
    return [lines[j] for j in order]


class Drawn:
    """One kernel with its problem, its precision and its blocks."""

    def __init__(self, number: int) -> None:
        self.number, self.draw = number, random.Random(number)
        d = self.draw
        self.dtype = d.choice(["float16", "float16", "bfloat16"])
        pick = self._format
        self.scores, self.soft, self.wide, self.run = pick(), pick(), pick(), pick()
        self.product = pick(0.8)
        self.chained = d.random() < 0.25
        self.total = self.product if self.chained else self.run
        causal, rows, keys = d.random() < 0.5, d.randint(1, 40), d.randint(1, 96)
        self.problem = Problem(
            heads=d.choice([1, 2]), seq_q=rows, seq_kv=max(keys, rows) if causal else keys, head_dim=d.choice([16, 32]),
            dtype=self.dtype, causal=causal,
        )  # fmt: skip
        self.output = d.choice([self.dtype, F])
        self.p = FlashPrecision(
            "drawn", self.scores, self.soft, self.wide, self.dtype, self.run, self.product, self.output,
            d.choice(["exp.correct", "exp.correct", "exp2.correct"]),
            d.choice(["", "sequential", "tree_halves"]), "chained" if self.chained else "fresh",
        )  # fmt: skip
        self.blocks = {"block_q": d.choice([16, 32]), "block_kv": d.choice([16, 32, 48])}
        self.source = self._source()

    @classmethod
    def plain(cls, source: str) -> Drawn:
        """Return a kernel of one's own in float32, float16 inputs, causal, with ragged tiles."""
        found = cls(0)
        found.source, found.blocks = source, {"block_q": 16, "block_kv": 16}
        found.problem = Problem(heads=2, seq_q=40, seq_kv=85, head_dim=16, causal=True)
        found.p = FlashPrecision("plain", *["float32"] * 3, "float16", *["float32"] * 3)
        return found

    def given(self) -> dict[str, Any]:
        """Return what the kernel takes beside its operands."""
        factor = LOG2_E if self.p.exp_variant.startswith("exp2") else 1.0
        return {"p": self.p, "scale": self.problem.scale * factor}

    def _format(self, usual: float = 0.6) -> str:
        return F if self.draw.random() < usual else self.dtype

    def _maybe(self, share: float = 0.5) -> bool:
        return self.draw.random() < share

    def _source(self) -> str:
        d, starts = self.draw, [f'o = full("row value", 0.0, "{self.total}")']
        body = self._scored()
        self.has_max = self._maybe(0.75)
        if self.has_max:
            starts.append(f'm = full("row", {d.choice(["-inf", "-8.0"])}, "{self.soft}")')
        self.has_sum = self._maybe(0.85)
        body += self._weights()
        if self.has_sum:
            starts.append(f'l = full("row", 0.0, "{self.run}")')
            body += self._row_sum()
        more, given = self._extra()
        starts, body = starts + given, [line for line in (*body, *self._output(), *more) if line]
        if self.has_max:
            body.append("m = m_new")
        lines = shuffled(d, body)
        finish = [f'o = o.to("{self.run}")'] if self.total != self.run or self._maybe(0.2) else []
        ways = [["o = o / l"], ["o = o / l"], ["h = 1.0 / l", "o = o * h"], ["o = o - log(l)"]]
        finish += d.choice(ways) if self.has_sum else []
        finish += [f"o = o {d.choice('+*')} {g.split()[0]}" for g in given]
        text = ['@kernel(q="row head", k="key head", v="key value", mask="row key")']
        text.append("def drawn(q, k, v, mask, p, scale):")
        text += [f"    {x}" for x in shuffled(d, starts)] + ["    for kj, vj in tiles(k, v):"]
        text += [f"        {x}" for x in lines] + [f"    {x}" for x in finish] + [f'    return o.to("{self.output}")']
        return "\n".join(text) + "\n"

    def _scored(self) -> list[str]:
        """Scores, scaled, masked, and what else happens to them: tile by tile or with a vector of rows."""
        d, body = self.draw, [f's = (q @ kj.T).to("{self.scores}")']
        steps = [f's = s.to("{self.soft}")', "s = s * scale"]
        if self.soft == self.scores and self._maybe():
            steps = ["s = s * scale"]
        elif self._maybe():
            steps = [f's = s.to("{self.soft}") * scale']
        extra = d.choice([
            [], [], ["s = maximum(s, -2.5)"], ["h = s * 0.5", "s = s - h * h"], ["h = s.max()", "s = s + h * 0.25"],
            ["h = exp(s * 0.125)", "s = s * (1.0 - h)"], ["s = s / (1.0 + maximum(s, -s))"],
            ["s = s * (1.0 / kj.size)"], ["s = s + (kj.index + 1) * 0.125"],
        ])  # fmt: skip
        masked = ["s = where(mask, s, -inf)"]
        return body + steps + (masked + extra if self._maybe(0.2) else extra + masked)

    def _weights(self) -> list[str]:
        """The running maximum and the rescaling factor, exponentials and P, cast before or after its row sum."""
        body, to = [], f'.to("{self.wide}")'
        if self.has_max:
            body += ["h = s.max()", "m_new = maximum(m, h)"] if self._maybe() else ["m_new = maximum(m, s.max())"]
            moved = f"exp((m - m_new){to})" if self._maybe(0.7) else f"exp(m - m_new){to}"
            body += [f"alpha = {moved}", f'a = alpha.to("{self.run}")' if self.has_sum or not self.chained else ""]
            body += [f"e = exp((s - m_new){to})" if self._maybe(0.7) else f"e = exp(s - m_new){to}"]
        else:
            body += [f"e = exp(s{to})"] if self._maybe(0.8) else [f"e = s{to}"]
        if self._maybe(0.15):
            body.append("e = e * 0.5")
        return [*body, f'w = e.to("{self.dtype}")']

    def _row_sum(self) -> list[str]:
        """The row sum of P before or after its cast, in the format of either."""
        d, to = self.draw, f'.to("{self.run}")'
        summed = d.choice(["e.sum()", "e.sum()", "w.sum()", f'w.to("{F}").sum()', f"e{to}.sum()"])
        if not self.has_max:
            return [f"l = l + {summed}{to}"]
        return d.choice([
            [f"h = {summed}", f"l = l * a + h{to}"], [f"l = {summed}{to} + a * l"],
            ["l = l * a", f"l = l + {summed}{to}"],
        ])  # fmt: skip

    def _output(self) -> list[str]:
        """O rescaled and added to: in one line or two, by rows or by the matrix unit."""
        d, to = self.draw, f'.to("{self.run}")'
        factor = "alpha" if self.wide == self.total else f'alpha.to("{self.total}")'
        if self.chained:
            rescaled = d.choice([[f"o = o * {factor}", "o = o + w @ vj"], [f"o = o * {factor} + w @ vj"]])
            return rescaled if self.has_max else ["o = o + w @ vj"]
        direct = self.product == self.run and self._maybe(0.7)
        pv = f'(w @ vj).to("{self.product}")' + ("" if direct else to)
        split = self._maybe()
        before, pv = ([f'pv = (w @ vj).to("{self.product}")'], f"pv{to}") if split else ([], pv)
        if not self.has_max:
            return [*before, f"o = o + {pv}"]
        return before + d.choice([
            [f"o = o * a + {pv}"], [f"o = {pv} + o * a"], ["o = o * a", f"o = o + {pv}"],
            ["h = o * a", f"o = h + {pv}"],
        ])  # fmt: skip

    def _extra(self) -> tuple[list[str], list[str]]:
        """States of no attention: of the scores, of the weights, of the whole tile; or a product more."""
        d, fmt = self.draw, self.run
        if self._maybe(0.5):
            return [], []
        to = f'.to("{fmt}")'
        value, row = 'c = full("row value", {}, "{}")', 'c = full("row", {}, "{}")'
        second, w2 = (f'w2 = {d.choice("ees")}.to("{self.dtype}")', "w2") if self._maybe(0.9) else ("", "w")
        lines, start = d.choice([
            ([f"c = maximum(c, s.max(){to})"], row.format(-8.0, fmt)), ([f"c = c + e.max(){to}"], row.format(1.0, fmt)),
            ([f"c = c * 0.5 + w.sum(){to}"], row.format(0.5, fmt)),
            ([f"c = c + e.sum(){to} * (kj.index + 1)"], row.format(0.0, fmt)),
            ([f"c = maximum(c, (q @ kj.T).to({fmt!r}).max())"], row.format(-1.0, fmt)),
            ([second, f"c = maximum(c, ({w2} @ vj).to({fmt!r}))"], value.format(-1.0, fmt)),
            ([second, f"h = ({w2} @ vj).to({fmt!r})", "c = c * 0.5 + h"], value.format(0.0, fmt)),
            ([second, f"c = c + {w2} @ vj"], value.format(0.0, F)) if fmt == F
            else ([f"c = c * 0.5 + s.max(){to}"], row.format(1.0, fmt)),
        ])  # fmt: skip
        return [x for x in lines if x], [start]
