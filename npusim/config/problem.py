"""Problems and their inputs: attention, kernels that validate a machine, layers, models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast, get_args

from pydantic import ConfigDict, Field, PrivateAttr, StrictInt, ValidationError, model_validator

from npusim.config.head_scores import GivenBias, bias_row
from npusim.config.messages import explain
from npusim.config.model import (
    HeadCount,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SpecModel,
    StrictBool,
    StrictFloat,
    fault_at,
)
from npusim.config.seen import KeyRanges, pairs_seen
from npusim.errors import SpecError
from npusim.units import ceil_div

# Side of a fractal of the Cube: head sizes fill complete fractals.
FRACTAL = 16
NonNegativeFloat = Annotated[StrictFloat, Field(ge=0)]
#: Formats of Q, K and V; float32 isolates the effects of later casts, float64 only checks schedules.
Dtype = Literal["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float64"]
#: The 8-bit formats, whose values may have scales.
SCALED = ("float8_e4m3fn", "float8_e5m2")
#: Formats with a scale for each block of 32 values along k; the format of their product is `GemmProblem.output_dtype`.
BlockDtype = Literal["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"]
#: Layouts in memory of a product's A and B (`GemmProblem.operands`).
Operands = Literal["nd", "nt", "nz"]
#: Narrower formats in which K and V may be stored.
CacheFormat = Literal["float8_e4m3fn", "int8"]
#: Number of keys that a query sees, including its own; or, as in FlashAttention, the numbers of keys before and after
#: its own (-1: all).
_Side = Annotated[int, Field(strict=True, ge=-1)]
Window = PositiveInt | tuple[_Side, _Side]
#: Keys of a KV head that share a scale in such a cache: one key, all keys, or a block of this size; or one scale for
#: each channel.
ScaledKeys = Literal["token", "head", "channel"] | PositiveInt
#: The result of a query that sees no key: 0, as in FlashAttention; NaN, from 0 / 0; or the mean of all V, which results
#: if a finite number replaces hidden scores.
Unseen = Literal["zero", "nan", "mean"]
_UNSEEN = ", ".join(get_args(Unseen))
#: Suffixes that name the parts of K and V in such a cache.
STORED, SCALES = "_stored", "_scale"
#: Layout of inputs and output in memory: the rows of a head together, or heads within a token (which is what CANN's
#: BSND, BSH and TND have in common).
Layout = Literal["bnsd", "bsnd"]
#: Scales by which stored float8 values are multiplied, one for each tensor.
InputScale = Annotated[PositiveFloat, Field(description="factor of a stored value")]


# ---------------------------------------------------------------- recipes for input tensors


class _SeededData(SpecModel):
    changes_tensors: ClassVar[bool] = False
    seed: NonNegativeInt = Field(default=0, description="seed of the random generator")


class NormalData(_SeededData):
    """Independent normal entries of Q, K and V."""

    kind: Literal["normal"] = "normal"
    mean: StrictFloat = 0.0
    deviation: PositiveFloat = 1.0


class UniformData(_SeededData):
    """Independent entries, uniform in ``[x0 - amplitude, x0 + amplitude]`` (PASA, equation 9)."""

    kind: Literal["uniform"]
    x0: StrictFloat
    amplitude: NonNegativeFloat


class HybridData(_SeededData):
    """Normal entries with rare outliers: ``N(x0, 1) + N(0, amplitude^2) Bernoulli(p)`` (PASA, eq. 10)."""

    kind: Literal["hybrid"]
    x0: StrictFloat
    amplitude: NonNegativeFloat
    # the value of PASA, section 3.1, and of FlashAttention-3's accuracy test
    probability: Annotated[StrictFloat, Field(ge=0, le=1)] = 0.001


class SinkData(_SeededData):
    """Scores N(0, 1), increased by ``gap`` on the first ``sinks`` keys; V normal (P-Cast, section 3.1).

    This recipe determines Q and K: the length of every query over all dimensions but the last is 1/scale, so that its
    scores on normal keys are exactly N(0, 1); the last dimension adds the gap.
    """

    kind: Literal["sink"]
    gap: StrictFloat = Field(description="difference between the scores of the sinks, after scaling, and the others")
    sinks: PositiveInt = Field(default=4, description="sink tokens, the first keys")


class ResonanceData(_SeededData):
    """Q and K share one wave along the head dimension (PASA, section 3.3.2 and figure 6).

    The entries of a row are ``amplitude cos(2 pi frequency c / head_dim) + N(0, deviation^2)``; K's wave lags by
    ``phase_degrees``.  Without deviation all entries of Q K^T are query_amplitude key_amplitude head_dim / 2
    cos(phase): large and positive in phase (0), large and negative out of phase (180).
    """

    kind: Literal["resonance"]
    query_amplitude: PositiveFloat
    key_amplitude: PositiveFloat
    frequency: PositiveInt = Field(description="periods along the head dimension")
    phase_degrees: StrictFloat = Field(description="lag of K's wave behind Q's")
    deviation: NonNegativeFloat = 1.0


class AmplifiedData(SpecModel):
    """Real tensors with the mean of K over the keys amplified: ``K' = (K - mean) + gain mean``.

    Results with such tensors are called amplified, never real; the workload names the tensors.
    """

    changes_tensors: ClassVar[bool] = True
    kind: Literal["amplified"]
    gain: PositiveFloat


# A new recipe is a new member here; its generator is next to the others in `numerics`.
DataRecipe = Annotated[
    NormalData | UniformData | HybridData | SinkData | ResonanceData | AmplifiedData, Field(discriminator="kind")
]


# ---------------------------------------------------------------- one device


def element_bytes(fmt: str) -> int:
    """Return the bytes of an element; this is a function because formats import NumPy, which the sizes of a problem do
    not need.
    """
    from npusim.formats import get_format

    return get_format(fmt).size_bytes


def stored_bytes(fmt: str, elements: int) -> int:
    """Return the bytes of a number of elements, including their scales."""
    from npusim.formats import stored_format

    return stored_format(fmt).bytes_of(elements)


def divisors_of(number: int) -> list[int]:
    """Return the divisors of ``number``, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def check_kv_heads(heads: int, kv_heads: int) -> None:
    """Raise the error that pydantic reports if query heads cannot share the KV heads equally; lists the divisors."""
    if heads % kv_heads:
        possible = " ".join(map(str, divisors_of(heads)))
        raise fault_at("kv_heads", f"{kv_heads} does not divide {heads} query heads; possible: {possible}")


class Sizes(SpecModel):
    """Sizes of a computation, created in code and from options; a fault of the user raises `SpecError`.

    The facts about a problem that a run asks for; this class states them for problems without bits or inputs.
    """

    #: Words of `npusim.simulation.request.NEEDS` that describe a run of the problem.
    features: ClassVar[frozenset[str]] = frozenset()
    #: Whether runs compute the bits of the problem.
    has_bits: ClassVar[bool] = False
    #: Whether inputs are plain tensors, which a caller that computes bits may pass by name.
    is_plain: ClassVar[bool] = False
    #: The options that request the problem, for error messages.
    asked_with: ClassVar[str] = "sizes of a layer (-w, --seq) on a node"

    if not TYPE_CHECKING:

        def __init__(self, **fields: object) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                lines = [f"{key}: {text}" if key else text for key, text in explain(error, fields)]
                raise SpecError("\n".join(lines)) from None

    def flops(self) -> int:
        """Return the operations of matrix products, 2 per multiply-add; 0 for other problems, and for those whose
        kernel counts the operations.
        """
        return 0

    def dense_flops(self) -> int:
        """Return the operations of matrix products without a mask."""
        return self.flops()

    @property
    def attention(self) -> Problem | None:
        """The problem's attention on one device; None if it has no attention."""
        return None

    @property
    def product(self) -> GemmProblem | None:
        """The problem as a matrix product on one device; None if it is not a product."""
        return None

    @property
    def sizes(self) -> dict[str, int | float]:
        """Sizes by the names that a schedule declares; empty for a problem with fields."""
        return {}

    @property
    def seen(self) -> KeyRanges | None:
        """The keys that a query sees, by its position; None if there are no queries."""
        return None

    @property
    def drawn(self) -> tuple[str, ...]:
        """Tensors other than the recipe's inputs that npusim draws for the problem if they are not given."""
        return ()

    @property
    def recipe(self) -> str:
        """How inputs are drawn, in words."""
        return "none"

    @property
    def drawn_seed(self) -> int:
        """The seed of drawn plain tensors."""
        return 0

    @property
    def needs(self) -> frozenset[str]:
        """Abilities that a schedule must have for the problem: ``scales``, ``lengths``, ``unseen``."""
        return frozenset()

    @property
    def widest_head(self) -> int:
        """Columns of the widest head; 0 where there are no heads."""
        return 0

    def query_rows(self) -> int:
        """Return the queries of all sequences; 0 if there are none."""
        return 0

    def output_rows(self) -> int:
        """Return the rows of the output of all heads; 0 where the problem does not state them."""
        return 0

    def all_pairs(self) -> int:
        """Return the (query, key) pairs of all heads that the mask does not hide; 0 if there are none."""
        return 0

    def with_seed(self, _seed: int) -> Self:
        """Return the problem with inputs of another seed; the same problem if nothing is drawn."""
        return self

    def stored_as(self, _layout: str, _scales: Mapping[str, float]) -> Self:
        """Return the problem with inputs in this order of axes and with these scales; the same problem if it has
        neither axes nor scales.
        """
        return self

    def with_bias(self, given: GivenBias, _kind: str = "") -> Problem:
        """Return the problem with a given bias in place of a drawn one.

        Raises `SpecError` if the problem has no bias of this kind (``shared``, ``head``; empty: any).
        """
        raise SpecError(_NO_BIAS.format(f", {_kind}" if _kind else ""))

    def few(self, _longest: int) -> Self:
        """Return a problem with few blocks of the same sizes and at most this number of tokens."""
        return self

    def with_usual(self, _usual: Mapping[str, float]) -> Self:
        """Return the problem with a schedule's usual sizes in place of missing ones; the same problem if none is
        missing.
        """
        return self

    def named_sizes(self) -> dict[str, Any] | None:
        """Return the sizes in the form of ``--problem``; None if other options state them."""
        return self.model_dump(exclude_defaults=True)

    def resized(self, sizes: Mapping[str, Any]) -> AnyProblem:
        """Return the problem with other sizes by name; raise `SpecError` for sizes that it does not have."""
        return problem_of({**self.model_dump(exclude_unset=True), **sizes})

    def folder(self, _title: str) -> str:
        """Return the sizes in the name of a run's folder; empty for sizes by name; ``_title``: the workload's title."""
        return ""

    def run_name(self, schedule: str, _title: str, _sizes: str) -> str:
        """Return the name of a run; ``_sizes``: integers by name."""
        return f"{schedule}-{self.flops() or 'bytes'}"

    def notes(self) -> tuple[str, ...]:
        """Return a run's notes on sizes that the problem pads."""
        return ()


def _where_stated(default: object, description: str) -> Any:
    """Return a field that records omit if it has its default."""
    return Field(default=default, description=description, exclude_if=lambda value: value == default)


#: Error for a bias that the problem does not have, and the kinds of bias.
_NO_BIAS = "bias: the tensors have a bias{}, which only attention on one device uses; remove the key"


class CallFields(SpecModel):
    """Fields of a call: visible keys, scores, lengths, and the storage of K and V."""

    window: Window | None = _where_stated(None, "keys that a query sees, itself included, or keys before and after it")
    sinks: NonNegativeInt = _where_stated(0, "first keys that are visible in addition to the window")
    prefix: NonNegativeInt = _where_stated(0, "first keys that every query sees, also queries before them")
    documents: tuple[PositiveInt, ...] = _where_stated((), "lengths of sequences packed end to end; each sees itself")
    chunk: PositiveInt | None = _where_stated(None, "keys of a chunk; a query sees only its own chunk")
    softcap: PositiveFloat | None = _where_stated(None, "a scaled score s becomes softcap tanh(s / softcap)")
    alibi: StrictBool = _where_stated(False, "a head's slope times the distance of query and key is added to scores")
    sink_logits: StrictBool = _where_stated(False, "each query head has one more score, which belongs to no key")
    lengths: tuple[PositiveInt, ...] = _where_stated((), "keys of each sequence, where they differ")
    query_lengths: tuple[PositiveInt, ...] = _where_stated(
        (), "number of queries of each sequence, its last tokens: prefill and decode mixed"
    )
    bias: Literal["shared", "head"] | None = _where_stated(
        None, "a tensor that is added to the scores, one for all heads or one for each"
    )
    page: NonNegativeInt = _where_stated(0, "keys of a page of K and V; 0: they are contiguous")
    cache: CacheFormat | None = _where_stated(None, "storage format of K and V, with float32 scales")
    cache_scale: ScaledKeys = _where_stated("token", "keys of a KV head that share a scale in the cache")
    unseen: Unseen | None = _where_stated(None, "output of a query that sees no key; absent: every query sees a key")


class Problem(Sizes, CallFields):
    """``softmax(scale * Q K^T + mask) V`` for ``batch`` sequences; immutable and hashable.

    Shapes: Q ``(batch, heads, seq_q, head_dim)``, K ``(batch, kv_heads, seq_kv, head_dim)``, V ``(batch, kv_heads,
    seq_kv, value_head_dim)``, O ``(batch, heads, seq_q, value_head_dim)``. With ``causal``, query ``i`` sees the keys
    ``j <= i + causal_offset``.  Of these it sees the last ``window`` and the first ``sinks``; it always sees the first
    ``prefix`` keys, and all keys of its own document or chunk (`npusim.config.seen`).  Float8 inputs are stored divided
    by ``q_scale``, ``k_scale``, ``v_scale``.

    With ``lengths``, sequence b has ``lengths[b]`` keys, and its last ``seq_q`` tokens (all tokens, if it has fewer)
    are its queries; rows beyond them are padding, or absent (packed).  ``batch`` and ``seq_kv`` follow.  K and V may be
    stored in pages of ``page`` keys, and V may be the first ``value_head_dim`` columns of K.  With ``cache`` they are
    stored in this format, each token of a head divided by a float32 scale, and products read ``dtype``.

    Raises
    ------
    SpecError
        A size is not positive, heads are not a multiple of KV heads, a head size of latents is not a multiple of 16,
        lengths or documents contradict another size, or a query would see no key.  The message names the value and the
        allowed values.
    """

    batch: PositiveInt = 1
    heads: HeadCount
    kv_heads: HeadCount = Field(default_factory=lambda data: data.get("heads", 1))
    seq_q: PositiveInt
    seq_kv: PositiveInt = Field(default_factory=lambda data: data.get("seq_q", 1))
    head_dim: PositiveInt
    value_head_dim: PositiveInt = Field(default_factory=lambda data: data.get("head_dim", FRACTAL))
    causal: StrictBool = False
    causal_offset: Annotated[int, Field(strict=True)] = Field(
        default_factory=lambda data: data.get("seq_kv", 0) - data.get("seq_q", 0)
    )
    dtype: Dtype = "float16"
    scale: StrictFloat = Field(
        default_factory=lambda data: 1.0 / math.sqrt(data.get("head_dim", 1)), description="factor of QK^T"
    )
    layout: Layout = "bnsd"
    q_scale: InputScale = 1.0
    k_scale: InputScale = 1.0
    v_scale: InputScale = 1.0
    data: DataRecipe = NormalData()
    page_seed: NonNegativeInt = _where_stated(0, "seed of the order of pages in memory")
    values_in_keys: StrictBool = _where_stated(False, "V is the first part of each row of K (latents)")
    filled: tuple[NonNegativeInt, NonNegativeInt] = _where_stated(
        (0, 0), "columns of Q and K, and of V, that are not inputs but zeros; the head sizes include them"
    )
    _bias: GivenBias | None = PrivateAttr(None)
    features: ClassVar[frozenset[str]] = frozenset(("attention", "model"))
    has_bits: ClassVar[bool] = True
    asked_with: ClassVar[str] = "sizes of attention: use -w, --seq, ... instead of --problem"

    def with_bias(self, given: GivenBias, kind: str = "") -> Problem:
        """Return the problem with the given bias in place of a drawn bias; see `Sizes.with_bias`."""
        if kind and self.bias != kind:
            return super().with_bias(given, kind)
        copy = self.model_copy()
        copy._bias = given
        return copy

    def bias_row(self, head: int, query: int, keys: int) -> Any:
        """Return the values added to the scores of a head's query, (keys,): the given bias, or a drawn one."""
        head = head if self.bias == "head" else 0
        return bias_row(head, query, keys) if self._bias is None else self._bias.row(head, query, keys)

    @property
    def attention(self) -> Problem | None:
        """The problem itself."""
        return self

    @property
    def drawn(self) -> tuple[str, ...]:
        """Tensors other than Q, K and V that npusim draws for the problem if they are not given."""
        drawn = {"bias": self.bias and self._bias is None, "sink_logits": self.sink_logits, "pages": self.page}
        return tuple(name for name, is_drawn in drawn.items() if is_drawn)

    @property
    def recipe(self) -> str:
        """The recipe's kind, and its seed."""
        seed = getattr(self.data, "seed", None)
        return self.data.kind if seed is None else f"{self.data.kind}, seed {seed}"

    @property
    def needs(self) -> frozenset[str]:
        """Abilities that a schedule must have for the problem."""
        stated = {"scales": self.is_scaled, "lengths": self.lengths, "unseen": self.unseen}
        return frozenset(name for name, value in stated.items() if value)

    @property
    def widest_head(self) -> int:
        """Columns of the widest head."""
        return max(self.head_dim, self.value_head_dim)

    def query_rows(self) -> int:
        """Return ``batch * seq_q``."""
        return self.batch * self.seq_q

    def output_rows(self) -> int:
        """Return the rows of the output of all heads."""
        return self.heads * self.query_count

    def all_pairs(self) -> int:
        """Return the (query, key) pairs of all heads that the mask does not hide."""
        return self.heads * self.pairs()

    def with_seed(self, seed: int) -> Self:
        """Return the problem with inputs of another seed; raise `SpecError` if its inputs are not drawn."""
        if "seed" not in type(self.data).model_fields:
            raise SpecError(f"seed: inputs of kind {self.data.kind} are not drawn; remove it")
        if seed < 0:
            raise SpecError(f"seed: {seed} must be at least 0")
        return self.model_copy(update={"data": self.data.model_copy(update={"seed": seed})})

    def stored_as(self, layout: str, scales: Mapping[str, float]) -> Self:
        """Return the problem with inputs in this order of axes and with these scales.

        In every order except ``bnsd``, the heads of a token are contiguous.
        """
        if layout == "bnsd" and not scales:
            return self
        return self.model_copy(update={"layout": "bnsd" if layout == "bnsd" else "bsnd", **scales})

    def few(self, longest: int) -> Self:
        """Return the attention of one KV head of the longest sequence."""
        one = self.sequence(self.lengths.index(self.seq_kv)) if self.lengths else self
        update: dict[str, object] = {"batch": 1, "heads": one.group_size, "kv_heads": 1}
        if one.seq_q == one.seq_kv > longest:
            update |= {"seq_q": longest, "seq_kv": longest}
        return one.model_copy(update=update)

    def named_sizes(self) -> dict[str, Any] | None:
        """Return None: a workload and its options state the sizes."""
        return None

    def folder(self, title: str) -> str:
        """Return the workload and the tokens."""
        return f"{title}-{f'{self.seq_q}x{self.seq_kv}' if self.seq_q != self.seq_kv else self.seq_kv}"

    def run_name(self, schedule: str, title: str, _sizes: str) -> str:
        """Return schedule, workload and keys."""
        return f"{schedule}-{title}-{self.seq_kv}"

    def notes(self) -> tuple[str, ...]:
        """Return notes on ALiBi for keys after their query, and on padded head sizes, which products, transfers and
        buffers use.
        """
        return (*self._of_later_keys(), *self._of_padding())

    def _of_later_keys(self) -> tuple[str, ...]:
        if not self.alibi or not (self.sides[1] != 0 or self.prefix):
            return ()
        return (
            "alibi: a head's slope times (key - query) is added, which is positive for keys after their query; "
            "FlashAttention subtracts the slope times |key - query| if there is no causal mask",
        )

    def _of_padding(self) -> tuple[str, ...]:
        if not any(self.filled):
            return ()
        full = self.head_dim, self.value_head_dim
        pairs = zip(("head_dim", "value_head_dim"), full, self.filled, strict=True)
        listed = ", ".join(f"{name} {size - count} is padded to {size}" for name, size, count in pairs if count)
        more = sum(self.filled) / (sum(full) - sum(self.filled))
        cost = f"products, transfers and buffers are {more * 100:.3g} % larger, and the time includes this"
        return (f"{listed}, with zeros: {cost}",)

    @model_validator(mode="before")
    @classmethod
    def _sizes_of_lengths(cls, data: object) -> object:
        if not isinstance(data, dict) or not data.get("lengths"):
            return data
        longest, queries = max(data["lengths"]), max(data.get("query_lengths") or data["lengths"])
        return {"batch": len(data["lengths"]), "seq_q": queries, "seq_kv": longest, **data}

    @model_validator(mode="before")
    @classmethod
    def _fill_heads(cls, data: object) -> object:
        """Increase head sizes to multiples of 16, as kernels do; the scale is that of the stated size."""
        if not isinstance(data, dict) or not isinstance(size := data.get("head_dim"), int):
            return data
        sizes = size, data.get("value_head_dim", size)
        if not all(isinstance(n, int) and n > 0 for n in sizes) or data.get("values_in_keys"):
            return data
        head, value = (ceil_div(n, FRACTAL) * FRACTAL for n in sizes)
        if (head, value) == sizes:
            return data
        filled = {"head_dim": head, "value_head_dim": value, "filled": (head - sizes[0], value - sizes[1])}
        return {"scale": 1.0 / math.sqrt(size), **data, **filled}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lengths or self.query_lengths:
            self._check_lengths()
        check_kv_heads(self.heads, self.kv_heads)
        self._check_seen()
        for name in ("head_dim", "value_head_dim"):
            _check_head_size(name, getattr(self, name))
        if self.causal and not self.unseen and self.seq_q > self.seq_kv:
            raise fault_at(
                "seq_q",
                f"{self.seq_q} causal queries but only {self.seq_kv} keys: the first {self.seq_q - self.seq_kv} "
                "queries would see none; use a seq_kv of at least seq_q, or set their output with unseen: "
                f"{_UNSEEN}",
            )
        if self.causal and not self.unseen and self.causal_offset < 0:
            raise fault_at(
                "causal_offset", f"{self.causal_offset} leaves query 0 without a key; must be >= 0, or set unseen"
            )
        if self.is_scaled and self.dtype not in SCALED:
            raise fault_at("q_scale, k_scale, v_scale", f"only {' and '.join(SCALED)} have scales, not {self.dtype}")
        if self.values_in_keys and self.value_head_dim > self.head_dim:
            raise fault_at("value_head_dim", f"{self.value_head_dim} is larger than the keys' {self.head_dim}")
        if self.cache is not None and self.dtype not in ("float16", "bfloat16"):
            raise fault_at(
                "cache", f"a cache in {self.cache} is converted to float16 or bfloat16, not to {self.dtype}; remove it"
            )
        if self.cache is None and self.cache_scale != "token":
            raise fault_at(
                "cache_scale", f"{self.cache_scale} is the scale of a cache, but there is no cache; set --cache"
            )
        if self.scale == 0:
            raise fault_at("scale", "0 makes all keys equal; must not be 0")
        return self

    def _check_seen(self) -> None:
        if self.sinks and self.window is None:
            raise fault_at(
                "sinks", f"the {self.sinks} first keys need a window, but there is none; set a window, or use a prefix"
            )
        for name in ("window", "prefix", "chunk"):
            value = getattr(self, name)
            if value and not self.causal and not isinstance(value, tuple):
                raise fault_at(name, f"{value} keys, counted from the query backwards, need a causal mask")
        ends, wanted = (tuple(accumulate(lengths)) for lengths in (self.documents, self.lengths or (self.seq_kv,)))
        if ends and ends[-1] != wanted[-1]:
            raise fault_at("documents", f"they add up to {ends[-1]}, but there are {wanted[-1]} keys")
        if ends and not set(wanted) <= set(ends):
            raise fault_at(
                "documents",
                f"a document contains the end of a sequence; sequences end at {', '.join(map(str, wanted))}",
            )
        before, after = self.sides
        first, last = self.causal_offset, self.causal_offset + self.seq_q - 1
        if self.window is None or self.unseen:
            return
        ways = f"must be larger, or set the output with unseen: {_UNSEEN}"
        if before is not None and last - before > self.seq_kv - 1:
            raise fault_at("window", f"with {self.window} keys the last query sees none; {ways}")
        if after is not None and first + after < 0:
            raise fault_at("window", f"with {self.window} keys the first query sees none; {ways}")

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The largest number of keys that a query sees before its own position, and after it; None: no limit."""
        before, after = self.window if isinstance(self.window, tuple) else ((self.window or 0) - 1, -1)
        return None if before < 0 else before, 0 if self.causal else None if after < 0 else after

    @property
    def seen(self) -> KeyRanges:
        """The keys that a query sees, by its position; a window or chunk that never hides a key is omitted."""

        def cut(size: int | None, beyond: int = 0) -> int | None:
            return None if size is None or size >= self.seq_kv + beyond else size

        documents = () if len(self.documents) == 1 else self.documents
        (before, after), prefix = self.sides, min(self.prefix, self.seq_kv)
        earlier, later = max(0, -self.causal_offset), max(0, self.causal_offset + self.seq_q - self.seq_kv)
        window = cut(None if before is None else before + 1, later)
        sinks = self.sinks if window is not None else 0
        return KeyRanges(self.seq_kv, cut(after, earlier), window, sinks, prefix, documents, cut(self.chunk))

    def _check_lengths(self) -> None:
        if self.query_lengths and len(self.query_lengths) != len(self.lengths):
            count = f"{len(self.query_lengths)} sequences"
            raise fault_at("query_lengths", f"{count}, but lengths has {len(self.lengths)}")
        for number, (queries, keys) in enumerate(zip(self.query_lengths, self.lengths, strict=False)):
            if queries > keys:
                raise fault_at("query_lengths", f"sequence {number} has {queries} queries but only {keys} keys")
        sizes = {"batch": len(self.lengths), "seq_kv": max(self.lengths)}
        sizes |= {"seq_q": max(self.query_lengths)} if self.query_lengths else {}
        for name, size in (sizes | {"causal_offset": self.seq_kv - self.seq_q}).items():
            if getattr(self, name) != size:
                raise fault_at(name, f"{getattr(self, name)}, but lengths imply {size}; remove it")

    def sequence(self, number: int) -> Self:
        """Return the attention of one of the sequences; a problem without lengths is returned unchanged."""
        if not self.lengths:
            return self
        keys = self.lengths[number]
        queries = self.query_lengths[number] if self.query_lengths else min(self.seq_q, keys)
        sizes = {"batch": 1, "lengths": (), "seq_q": queries, "seq_kv": keys, "causal_offset": keys - queries}
        first = sum(self.lengths[:number]) if self.documents else 0
        ends = zip(self.documents, accumulate(self.documents), strict=True)
        documents = tuple(n for n, end in ends if first < end <= first + keys)
        return self.model_copy(update={**sizes, "query_lengths": (), "documents": documents})

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return self.lengths or (self.seq_kv,) * self.batch

    @property
    def queries(self) -> tuple[int, ...]:
        """Queries of each sequence."""
        some = self.query_lengths or tuple(min(self.seq_q, keys) for keys in self.lengths)
        return some or (self.seq_q,) * self.batch

    @property
    def last_offset(self) -> int:
        """Largest position of the first query of a sequence, at least 0."""
        begins = (keys - queries for keys, queries in zip(self.keys, self.queries, strict=True))
        return max(0, *begins) if self.lengths else max(0, self.causal_offset)

    @property
    def output_cols(self) -> int:
        """Columns of a head's output."""
        return self.value_head_dim - self.filled[1]

    @property
    def key_count(self) -> int:
        """Keys of all sequences."""
        return sum(self.lengths) or self.batch * self.seq_kv

    @property
    def query_count(self) -> int:
        """Queries of all sequences."""
        return sum(self.queries) if self.lengths else self.batch * self.seq_q

    @property
    def score_changes(self) -> tuple[str, ...]:
        """Changes to scores other than scaling and masking."""
        return tuple(name for name in ("softcap", "alibi", "bias", "sink_logits") if getattr(self, name))

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def is_scaled(self) -> bool:
        """Whether stored inputs represent other values (with scales)."""
        return (self.q_scale, self.k_scale, self.v_scale) != (1.0, 1.0, 1.0)

    @property
    def score_scale(self) -> float:
        """Factor of Q K^T of the stored values."""
        return self.scale * self.q_scale * self.k_scale

    def pairs(self) -> int:
        """Return the number of (query, key) pairs of one head that the mask does not hide, in all sequences."""
        counts = Counter(map(self.sequence, range(self.batch))) if self.lengths else {self: self.batch}
        return sum(count * one.attended_pairs() for one, count in counts.items())

    def attended_pairs(self) -> int:
        """Return the number of (query, key) pairs of one head that the mask does not hide in a sequence of ``seq_kv``
        keys.
        """
        if not self.seen.is_plain or (self.unseen and self.causal):
            return pairs_seen(self.seen, self.causal_offset, self.seq_q)
        if not self.causal:
            return self.seq_q * self.seq_kv
        # Each row up to `full` sees one key more than the previous row; all later rows see every key.
        full = min(self.seq_q, max(0, self.seq_kv - self.causal_offset))
        growing = full * (self.causal_offset + 1) + full * (full - 1) // 2
        return growing + (self.seq_q - full) * self.seq_kv

    def flops(self) -> int:
        """Return the operations of both products over the pairs that the mask does not hide, 2 per multiply-add."""
        return self.flops_of(self.pairs())

    def flops_of(self, pairs: int) -> int:
        """Return the operations of both products over a number of (query, key) pairs of one head, in all sequences.

        Operations on the padding of head sizes do not count.
        """
        return self.heads * pairs * 2 * (self.head_dim + self.value_head_dim - sum(self.filled))

    def kv_bytes(self) -> int:
        """Return the bytes of K and V."""
        width = self.head_dim + (0 if self.values_in_keys else self.value_head_dim)
        tokens = self.kv_heads * self.key_count
        if self.cache is None:
            return tokens * width * element_bytes(self.dtype)
        each = width if self.cache_scale == "channel" else 1 if self.values_in_keys else 2
        scales = self.kv_heads * sum(ceil_div(n, self.scaled_keys) for n in self.keys) * each
        return tokens * width * element_bytes(self.cache) + scales * element_bytes("float32")

    @property
    def scaled_keys(self) -> int:
        """Number of keys of a KV head that share a scale in the cache: all keys, if there is a scale per channel or
        head.
        """
        each = self.cache_scale
        return each if isinstance(each, int) else 1 if each == "token" else self.seq_kv

    def bytes_moved(self) -> int:
        """Return the bytes of inputs and output, each once."""
        rows = self.heads * self.query_count * (self.head_dim + self.value_head_dim)
        pairs = {None: 0, "shared": 1, "head": self.heads}[self.bias] * self.seq_q * self.seq_kv
        return self.kv_bytes() + (rows + pairs) * element_bytes(self.dtype)

    def dense_flops(self) -> int:
        """Return the operations of both products without a mask, as papers count them, also for causal attention."""
        return self.flops_of(self.model_copy(update={"causal": False}).pairs())


def _check_head_size(name: str, value: int) -> None:
    if value % FRACTAL == 0:
        return
    upper = ceil_div(value, FRACTAL) * FRACTAL
    nearest = f"{upper - FRACTAL} or {upper}" if upper > FRACTAL else str(upper)
    raise fault_at(name, f"{value} is not a multiple of {FRACTAL}; nearest allowed: {nearest}")


class GemmProblem(Sizes):
    """``C (m, n) = A (m, k) B (k, n)`` on one device; ``count``: number of such products in a call, such as one per
    expert.

    ``operands``: order of A and B in memory. Either both row by row; or B transposed, (n, k), like the weights of
    linear layers (NT); or both in columns with the width of a fractal, and row by row within a column (NZ).
    """

    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    dtype: Literal[Dtype, BlockDtype] = "float16"
    count: PositiveInt = 1
    operands: Operands = "nd"
    is_plain: ClassVar[bool] = True
    asked_with: ClassVar[str] = "a matrix product: --problem m=4096,n=4096,k=4096"

    @property
    def product(self) -> GemmProblem:
        """The problem itself."""
        return self

    def flops(self) -> int:
        """Return operations, 2 per multiply-add."""
        return 2 * self.count * self.m * self.n * self.k

    @property
    def output_dtype(self) -> Dtype:
        """Format of C: the format of A and B, or bfloat16 if that format is a block format."""
        return cast("Dtype", "bfloat16" if self.dtype in get_args(BlockDtype) else self.dtype)

    def bytes_moved(self) -> int:
        """Return the bytes of A, B and C, each once."""
        inputs = stored_bytes(self.dtype, self.m * self.k) + stored_bytes(self.dtype, self.k * self.n)
        return self.count * (inputs + stored_bytes(self.output_dtype, self.m * self.n))


class CopyProblem(Sizes):
    """A copy of ``bytes`` from global memory to global memory."""

    bytes: PositiveInt
    asked_with: ClassVar[str] = "a number of bytes: --problem bytes=1MiB"

    def bytes_moved(self) -> int:
        """Return the bytes read and written."""
        return 2 * self.bytes


class RowsProblem(Sizes):
    """Operations between the products of a layer, on ``heads`` matrices of (rows, cols).

    ``norm`` adds an update and normalises; ``rotary`` rotates the two halves (``cols`` columns each) of a head;
    ``gate`` multiplies SiLU of one matrix with another matrix; ``gelu`` has one input; ``route`` selects the ``parts``
    largest values of a row's softmax; ``sum`` adds ``parts`` matrices.
    """

    what: Literal["norm", "rotary", "gate", "gelu", "route", "sum"]
    heads: PositiveInt = 1
    parts: PositiveInt = 1
    rows: PositiveInt
    cols: PositiveInt
    dtype: Dtype = "float16"

    def bytes_moved(self) -> int:
        """Return the bytes of inputs and results, each once."""
        matrices = {"norm": 4, "rotary": 4, "gate": 3, "gelu": 2, "route": 2, "sum": self.parts + 1}[self.what]
        shared = 2 * self.rows * self.cols if self.what == "rotary" else 0
        return (matrices * self.heads * self.rows * self.cols + shared) * element_bytes(self.dtype)


class OperatorProblem(Sizes):
    """One operator of PyTorch between products, run as a kernel over ``rows`` rows of ``cols`` elements; npusim
    predicts only its time.

    ``what``, with inputs and result in float32: ``widen`` and ``narrow`` convert ``dtype`` to float32 and back,
    ``square``, ``mean`` (of each row), ``column`` (an operation on one number per row) and ``rescale`` (a product with
    one number per row). In ``dtype``: ``add`` and ``gelu`` of contiguous matrices; ``scale`` (a product with a factor
    that rows or heads share), ``negate``, ``silu`` and ``store`` (into a part of a tensor) of one matrix; ``times`` and
    ``plus`` of two matrices that are parts of other tensors; ``join`` of two halves.
    """

    asked_with: ClassVar[str] = "an operator of a layer (npusim run layer -t framework=eager)"
    what: Literal[
        "widen",
        "square",
        "mean",
        "column",
        "rescale",
        "narrow",
        "scale",
        "negate",
        "join",
        "plus",
        "store",
        "add",
        "silu",
        "times",
        "gelu",
    ]
    rows: PositiveInt
    cols: PositiveInt
    dtype: Dtype = "bfloat16"

    def bytes_moved(self) -> int:
        """Return the bytes of the operator's full-size inputs and of its result, each once."""
        own, wide = element_bytes(self.dtype), element_bytes("float32")
        matrices = {"widen": own + wide, "narrow": own + wide, "mean": wide}
        matrices |= dict.fromkeys(("square", "column", "rescale"), 2 * wide)
        matrices |= dict.fromkeys(("plus", "add", "times"), 3 * own)
        return self.rows * self.cols * matrices.get(self.what, 2 * own)


#: A size by name: a number, or a switch; the schedule declares its sizes.
NamedSize = StrictBool | StrictInt | StrictFloat


class KernelProblem(Sizes):
    """Sizes of a launch on plain tensors: numbers by the names of the launch's arguments, and the recipe of its inputs.

    ``dtype``: format of tensors for which the launch states no format.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, NamedSize]
    dtype: Dtype = "float16"
    seed: NonNegativeInt = 0
    features: ClassVar[frozenset[str]] = frozenset(("plain",))  # this feature alone needs no option
    has_bits: ClassVar[bool] = True
    is_plain: ClassVar[bool] = True
    asked_with: ClassVar[str] = "sizes, with the names in its launch: --problem M=4096,N=4096"

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: object) -> object:
        return data  # any name may be a size

    @classmethod
    def of(cls, problem: Mapping[str, Any] | SpecModel | None) -> KernelProblem:
        """Return the sizes by name, or the sizes of another problem."""
        if isinstance(problem, cls):
            return problem
        sizes = problem.model_dump(exclude_defaults=True) if isinstance(problem, SpecModel) else problem
        return cls(**(sizes or {}))

    @property
    def sizes(self) -> dict[str, int | float]:
        """Numbers by name."""
        return dict(self.__pydantic_extra__)

    @property
    def drawn_seed(self) -> int:
        """The seed of all inputs."""
        return self.seed

    @property
    def recipe(self) -> str:
        """The kind of all inputs, and the seed."""
        return f"normal, seed {self.seed}"

    def with_usual(self, usual: Mapping[str, float]) -> Self:
        """Return the problem with a schedule's usual sizes in place of missing ones, and switches as 0 or 1."""
        sizes = self.sizes
        switches = {n: int(x) for n, x in sizes.items() if isinstance(x, bool) and isinstance(usual.get(n), bool)}
        return type(self)(**{n: int(size) for n, size in usual.items()} | self.model_dump() | switches)

    def with_seed(self, seed: int) -> Self:
        """Return the problem with inputs of another seed."""
        if seed < 0:
            raise SpecError(f"seed: {seed} must be at least 0")
        return self.model_copy(update={"seed": seed})

    def resized(self, sizes: Mapping[str, Any]) -> KernelProblem:
        """Return the problem with other sizes by name."""
        return self.of({"dtype": self.dtype, "seed": self.seed, **self.sizes, **sizes})

    def run_name(self, schedule: str, _title: str, sizes: str) -> str:
        """Return schedule and sizes."""
        return "-".join(filter(None, (schedule, sizes)))


def problem_of(sizes: Mapping[str, Any]) -> AnyProblem:
    """Return the problem of sizes by name: a product, a copy, attention if all names are its fields, else a launch.

    Raises `SpecError` for a size that the problem does not have or that exceeds its limits.
    """
    if (kernel := kernel_problem(sizes)) is not None:
        return kernel
    return (Problem if sizes.keys() <= Problem.model_fields.keys() else KernelProblem)(**sizes)


def kernel_problem(sizes: Mapping[str, object], dtype: str | None = None) -> GemmProblem | CopyProblem | None:
    """Return a matrix product if sizes name ``m``, ``n``, ``k`` (and ``count``, ``operands``), a copy if they name
    ``bytes``, else None.
    """
    if sizes.keys() == {"bytes"}:
        return CopyProblem(**sizes)
    if sizes.keys() - {"count", "operands", *(["dtype"] if dtype is None else [])} == {"m", "n", "k"}:
        return GemmProblem(**sizes, **({} if dtype is None else {"dtype": dtype}))
    return None


def launch_problem(
    sizes: Mapping[str, Any], *, is_plain: bool, dtype: str | None = None
) -> GemmProblem | CopyProblem | KernelProblem:
    """Return the problem that these sizes describe: a product, a copy, or (``is_plain``) a schedule of plain tensors.

    Raises `SpecError` if the names belong to no such problem.
    """
    if not is_plain and (problem := kernel_problem(sizes, dtype)) is not None:
        return problem
    if not is_plain:
        raise SpecError(
            f"problem: {', '.join(sizes)}: write m, n and k (gemm), or bytes (copy); other names are for schedules "
            "of plain tensors"
        )
    return KernelProblem(**sizes, **({} if dtype is None else {"dtype": dtype}))


AnyProblem = Problem | GemmProblem | CopyProblem | RowsProblem | OperatorProblem | KernelProblem


# ---------------------------------------------------------------- several devices


class SharedProblem(Problem):
    """Attention whose heads ``ranks`` devices share; the sizes are those of one device."""

    ranks: PositiveInt

    @model_validator(mode="after")
    def _check_sequences(self) -> Self:
        if self.lengths:
            raise fault_at("lengths", "devices that share heads need sequences of equal length (batch, seq)")
        if any(self.filled):
            _check_head_size("head_dim", self.head_dim - self.filled[0])
            _check_head_size("value_head_dim", self.value_head_dim - self.filled[1])
        return self

    @classmethod
    def around(cls, attention: Problem, **more: object) -> Self:
        """Return the problem whose attention on one device is ``attention``."""
        return cls(**{**{n: getattr(attention, n) for n in Problem.model_fields}, **more})

    @property
    def attention(self) -> Problem:
        """Return the attention of one device."""
        return Problem(**{name: getattr(self, name) for name in Problem.model_fields})

    @property
    def cached(self) -> Problem:
        """Return the attention whose keys and values are the entries of a cache."""
        return self.attention

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
