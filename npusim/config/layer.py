"""Problems of several devices: attention they share, a layer around it, a model of such layers."""

from __future__ import annotations

from typing import Self

from npusim.config.model import NonNegativeInt, PositiveInt, StrictBool
from npusim.config.problem import Problem


class SharedProblem(Problem):
    """Attention whose heads ``ranks`` devices share; the sizes are those of one device."""

    ranks: PositiveInt

    @classmethod
    def around(cls, attention: Problem, **more: object) -> Self:
        """Return the problem whose attention on one device is ``attention``."""
        return cls(**{**{n: getattr(attention, n) for n in Problem.model_fields}, **more})

    @property
    def attention(self) -> Problem:
        """Return the attention of one device."""
        return Problem(**{name: getattr(self, name) for name in Problem.model_fields})

    @property
    def whole(self) -> Problem:
        """Return the attention of all heads."""
        heads = {"heads": self.heads * self.ranks, "kv_heads": self.kv_heads * self.ranks}
        return self.attention.model_copy(update=heads)

    @property
    def rows(self) -> int:
        """Return the rows over batch and sequence."""
        return self.batch * self.seq_q

    @property
    def width(self) -> int:
        """Return the columns of the attention's output on one device."""
        return self.heads * self.value_head_dim


class LayerProblem(SharedProblem):
    """Attention, output projection and AllReduce of one layer on ``ranks`` devices.

    Every device computes all ``hidden`` columns of its partial product, which the AllReduce adds up.
    """

    hidden: PositiveInt

    def flops(self) -> int:
        """Return the operations of one device: attention and projection."""
        return super().flops() + 2 * self.rows * self.width * self.hidden


class ModelProblem(LayerProblem):
    """``layers`` equal layers, each attention and an FFN of width ``intermediate``, between vocabularies.

    With ``gated`` the FFN has a third matrix.  ``vocab`` 0: unknown, no matrix for it.  ``parameters`` are those
    stated for the whole model, 0: those of its shapes.
    """

    layers: PositiveInt
    intermediate: PositiveInt
    gated: StrictBool = False
    vocab: NonNegativeInt = 0
    parameters: NonNegativeInt = 0

    @property
    def qkv_width(self) -> int:
        """Return the columns of Q, K and V on one device."""
        return self.heads * self.head_dim + self.kv_heads * (self.head_dim + self.value_head_dim)

    @property
    def ffn_width(self) -> int:
        """Return the columns inside the FFN on one device, rounded up."""
        return -(-self.intermediate // self.ranks)

    def flops(self) -> int:
        """Return the operations of one layer on one device."""
        matrices = 3 if self.gated else 2
        product = self.qkv_width + matrices * self.ffn_width
        return super().flops() + 2 * self.rows * self.hidden * product
