"""A model's layers: the products around attention, with latent projections and experts, and their weights."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from npusim.config.model import NonNegativeInt, PositiveFloat, PositiveInt, SpecModel, StrictBool, fault_at
from npusim.config.problem import LayerProblem, Problem
from npusim.late_methods import dataclass
from npusim.units import ceil_div

#: Fields of attention in which local layers differ from other layers.
LOCAL = ("window", "sinks", "chunk")


class LatentAttention(SpecModel):
    """Sizes of multi-head latent attention; prefill runs it as plain attention with heads of 192 and 128, decoding in
    absorbed form.
    """

    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt
    nope_head_dim: PositiveInt
    rope_head_dim: PositiveInt

    @property
    def width(self) -> int:
        """Return the number of elements that the cache stores for a token, for all heads together."""
        return self.kv_lora_rank + self.rope_head_dim


class Experts(SpecModel):
    """A mixture of experts in place of the FFN; the first layers may have a dense FFN."""

    count: PositiveInt = Field(description="number of routed experts of a layer")
    per_token: PositiveInt = Field(description="number of routed experts of each token")
    width: PositiveInt = Field(description="width inside one expert")
    shared_width: NonNegativeInt = Field(default=0, description="width inside the experts that every token uses")
    dense_layers: NonNegativeInt = Field(
        default=0, description=("number of layers with a dense FFN, whose width is `intermediate`")
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.per_token > self.count:
            raise fault_at("per_token", f"{self.per_token} experts per token, but there are only {self.count}")
        return self

    def touched(self, tokens: int) -> int:
        """Return the expected number of different experts that ``tokens`` tokens use, rounded.

        Each token uses ``per_token`` different experts, all equally likely and independent of other tokens: ``count (1
        - (1 - per_token / count)^tokens)``.
        """
        return round(self.count * (1.0 - (1.0 - self.per_token / self.count) ** tokens))


class StoredWeights(SpecModel):
    """Formats of the matrices of a model's layers if they do not have 16 bits; they do not apply to the vocabulary's
    matrices.
    """

    bits: PositiveFloat = Field(description="bits of a weight, including its share of the scales")
    of: Literal["layers", "experts"] = Field(
        default="layers", description=("matrices whose weights have this number of bits; other weights have 16 bits")
    )


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights in a model's matrices: all weights, and those that one token uses; without norms and
    biases.
    """

    layers: int
    layers_active: int
    vocabulary: int

    @property
    def total(self) -> int:
        """Return the number of all weights."""
        return self.layers + self.vocabulary

    @property
    def active(self) -> int:
        """Return the number of weights that one token uses, including the vocabulary's, as the names of models count
        them.
        """
        return self.layers_active + self.vocabulary


class ModelProblem(LayerProblem):
    """A model of ``layers`` layers, each attention and an FFN of width ``intermediate`` or ``experts``, and a
    vocabulary.

    gated
        Whether an FFN has a third matrix.
    vocab, tied
        Size of the vocabulary (0: unknown, no matrix); whether one matrix serves as both embedding and output matrix.
    model_kv_heads
        Number of KV heads of the model, if devices store copies so that all devices together store more; 0: they store
        no copies.
    layers, parameters
        Number of layers; number of parameters that the model states, 0: the sum of the shapes.
    latent
        Q, K and V are results of low-rank products. A cache stores latents, and a decoding step multiplies queries
        directly with latents.
    stored
        Formats of the weights that do not have 16 bits.
    local, local_layers
        Attention of the local layers, which differs only in its window or chunk; number of such layers, which are
        assumed to be distributed evenly.
    """

    features: ClassVar[frozenset[str]] = LayerProblem.features | {"models"}
    has_bits: ClassVar[bool] = False
    layers: PositiveInt
    intermediate: PositiveInt
    gated: StrictBool = False
    vocab: NonNegativeInt = 0
    model_kv_heads: NonNegativeInt = 0
    tied: StrictBool = False
    parameters: NonNegativeInt = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    stored: StoredWeights | None = None
    local: Problem | None = None
    local_layers: NonNegativeInt = 0

    @property
    def are_local(self) -> list[bool]:
        """Whether each layer is a local layer."""
        shares = [layer * self.local_layers // self.layers for layer in range(self.layers + 1)]
        return [before < after for before, after in pairwise(shares)]

    def layer_of(self, *, is_local: bool) -> Self:
        """Return the model with the same attention in all layers: that of its local layers, or that of its other
        layers.
        """
        assert not is_local or self.local is not None
        attention = self.local if is_local else None
        seen = {name: getattr(attention, name) for name in LOCAL} if attention else {}
        return self.model_copy(update={**seen, "local": None, "local_layers": 0})

    @property
    def is_absorbed(self) -> bool:
        """Whether W_UK and W_UV are multiplied by Q and by the result of attention, instead of by K and V."""
        return self.latent is not None and self.seq_q < self.seq_kv

    @property
    def attention(self) -> Problem:
        """Return the attention of one device."""
        return self.cached if self.is_absorbed else super().attention

    @property
    def cached(self) -> Problem:
        """Return the attention whose keys and values are the entries of the cache, which are latents if the model has
        them.
        """
        attention, latent = super().attention, self.latent
        if latent is None:
            return attention
        sizes = {"kv_heads": 1, "head_dim": latent.width, "value_head_dim": latent.kv_lora_rank}
        return attention.model_copy(update={**sizes, "values_in_keys": True})

    @property
    def qkv_width(self) -> int:
        """Return the columns of Q, K and V on one device."""
        return self.heads * self.head_dim + self.kv_heads * (self.head_dim + self.value_head_dim)

    @property
    def ffn_width(self) -> int:
        """Return the columns inside the dense FFN on one device, rounded up."""
        return ceil_div(self.intermediate, self.ranks)

    @property
    def dense_layers(self) -> int:
        """Return how many layers have a dense FFN."""
        return self.layers if self.experts is None else self.experts.dense_layers

    def projections(self) -> tuple[tuple[str, int, int], ...]:
        """Return the products that compute Q, K and V on one device: name, number of columns and length of each sum.

        A product whose result is a latent is computed completely on every device.
        """
        latent = self.latent
        if latent is None:
            return (("qkv", self.qkv_width, self.hidden),)
        rank, queries = latent.q_lora_rank, self.heads * self.head_dim
        values = self.heads * (latent.nope_head_dim + self.value_head_dim)
        down = ("latent", (rank or 0) + latent.width, self.hidden)
        return (down, ("q", queries, rank or self.hidden), ("kv", values, latent.kv_lora_rank))

    def ffn_flops(self, *, is_dense: bool) -> int:
        """Return the operations per row of a layer's FFN on one device: of the dense FFN, or of the experts and their
        router.
        """
        matrices, experts = 3 if self.gated else 2, self.experts
        if is_dense or experts is None:
            return 2 * self.hidden * matrices * self.ffn_width
        width = experts.per_token * ceil_div(experts.width, self.ranks) + ceil_div(experts.shared_width, self.ranks)
        return 2 * self.hidden * (matrices * width + experts.count)

    def layer_flops(self, *, is_dense: bool) -> int:
        """Return the operations of one layer on one device."""
        product = 2 * sum(columns * length for _, columns, length in self.projections())
        product += 2 * self.width * self.hidden
        return self.attention.flops() + self.rows * (product + self.ffn_flops(is_dense=is_dense))

    def flops(self) -> int:
        """Return the operations of one layer on one device; with experts if the model has any."""
        return self.layer_flops(is_dense=not self.dense_layers < self.layers)

    @property
    def copied(self) -> int:
        """Return the number of parameters in copies of KV heads, that is, heads that another device stores too."""
        copies = self.ranks * self.kv_heads - (self.model_kv_heads or self.ranks * self.kv_heads)
        return 0 if self.latent else self.layers * copies * (self.head_dim + self.value_head_dim) * self.hidden

    def weights(self) -> Parameters:
        """Return the number of parameters on all devices, computed from the shapes."""
        shared = sum(n * k * (1 if name == "latent" else self.ranks) for name, n, k in self.projections())
        attention = shared + self.ranks * self.width * self.hidden
        matrix, experts = (3 if self.gated else 2) * self.hidden, self.experts
        dense, sparse = self.dense_layers, self.layers - self.dense_layers
        layers = self.layers * attention + dense * matrix * self.intermediate
        routed = active = 0
        if experts is not None:
            always = self.hidden * experts.count + matrix * experts.shared_width
            routed = sparse * (always + matrix * experts.width * experts.count)
            active = sparse * (always + matrix * experts.width * experts.per_token)
        vocabulary = self.vocab * self.hidden * (1 if self.tied else 2)
        return Parameters(layers + routed, layers + active, vocabulary)

    def stored_bytes(self, bits: float = 16) -> float:
        """Return the bytes of the layers' weights on all devices; ``bits``: bits of a weight for which `stored` has no
        format.
        """
        weights, experts, stored = self.weights(), self.experts, self.stored
        total = self.parameters - weights.vocabulary if self.parameters else weights.layers
        if stored is None:
            return total * bits / 8
        routed = 0 if experts is None else (self.layers - self.dense_layers) * experts.width * experts.count
        other = 0 if stored.of == "layers" else total - (3 if self.gated else 2) * self.hidden * routed
        return (other * bits + (total - other) * min(bits, stored.bits)) / 8
