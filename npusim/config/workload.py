"""A model's attention layer as its workload file describes it, and the problem of one device."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from npusim.config.layers import Experts, LatentAttention, ModelProblem, StoredWeights
from npusim.config.model import (
    Count,
    HeadCount,
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SpecModel,
    StrictBool,
    Text,
    fault_at,
)
from npusim.config.problem import CallFields, DataRecipe, Dtype, NormalData, Problem, check_kv_heads, divisors_of
from npusim.errors import SpecError
from npusim.units import format_bytes

WORKLOAD_SCHEMA = "npusim.workload/1"
#: Features of models' attention that npusim does not compute.
Unmodelled = Literal["bias", "layers", "rotary", "sparse"]
UNMODELLED: Mapping[str, str] = MappingProxyType(
    {
        "bias": "a learned bias of the scores",
        "layers": "layers of a kind other than attention",
        "rotary": "keys rotated in each call",
        "sparse": "a selection of keys at run time",
    }
)
#: Keys of a config.json whose omission matters more than that of other keys.
UNREAD: Mapping[str, str] = MappingProxyType({"model_type": "an unknown type of model"})
#: Features that npusim computes, but that a run may nevertheless ignore; each has a description of the run without it.
OPTIONAL = ("window", "chunk", "softcap", "alibi", "sink_logits")
#: Names of features that a run may ignore.
IGNORABLE = (*OPTIONAL, *UNMODELLED)
#: Fields that a problem has too, and that a call may change.
OF_PROBLEM = tuple(name for name in CallFields.model_fields if name != "lengths")
#: Sizes that a call may give in place of a workload's.
_SIZES = (
    *("seq", "seq_q", "seq_kv", "batch", "lengths", "tensor_parallel", "causal", "dtype"),
    *("heads", "kv_heads", "head_dim", "value_head_dim"),
)
#: Kinds of layers: all layers are global, unless a window or chunk is stated for only some of them.
LayerKind = Literal["global", "local"]


class TensorFile(SpecModel):
    """Real inputs: a packaged tensor file and the prefix of its keys (``<prefix>.q``)."""

    file: Text
    prefix: str = ""


class Workload(CallFields):
    """Shapes of a model's attention and of the rest of its layer, for all devices together.

    ``heads`` and ``kv_heads`` are those of the whole layer; `problem` divides them by ``tensor_parallel``.
    """

    schema_id: Literal["npusim.workload/1"] = Field(alias="schema", description="schema of this file")
    name: Name
    description: Text
    source: Text | None = Field(default=None, description="source of the shapes; packaged files state it")
    heads: HeadCount = Field(description="query heads of the layer")
    kv_heads: HeadCount = Field(default_factory=lambda data: data.get("heads", 1), description="default: heads")
    head_dim: PositiveInt
    value_head_dim: PositiveInt = Field(
        default_factory=lambda data: data.get("head_dim", 1), description="default: head_dim"
    )
    hidden: PositiveInt | None = Field(default=None, description="width of the residual stream")
    layers: PositiveInt | None = None
    intermediate: PositiveInt | None = Field(default=None, description="width inside the FFN")
    gated: StrictBool = Field(default=False, description="the FFN has a third, gating matrix")
    experts: Experts | None = Field(default=None, description="a mixture of experts in place of the FFN")
    vocab: PositiveInt | None = Field(default=None, description="tokens of the vocabulary")
    tied: StrictBool = Field(default=False, description="the output projection is the embedding's matrix")
    parameters: PositiveInt | None = Field(
        default=None, description="number of parameters of the model, if its shapes do not determine it"
    )
    local_layers: NonNegativeInt = Field(
        default_factory=lambda data: (data.get("layers") or 1) if data.get("window") or data.get("chunk") else 0,
        description="number of layers with that window or chunk; default: all",
    )
    scale: PositiveFloat | None = Field(default=None, description="factor of QK^T; default: 1 / sqrt(head_dim)")
    unmodelled: tuple[Unmodelled, ...] = Field(
        default=(), description="parts of its attention that npusim does not compute"
    )
    unread: tuple[Text, ...] = Field(
        default=(), description="keys of its config.json that npusim does not read and that may change the result"
    )
    stored: StoredWeights | None = Field(default=None, description="weights that do not have 16 bits")
    latent: LatentAttention | None = None
    tensor_parallel: PositiveInt = Field(default=1, description="number of devices that share the heads")
    batch: Count = 1
    seq: Count = Field(description="number of tokens, unless the command line states another")
    seq_kv: Count | None = Field(default=None, description="keys; default: seq")
    causal: StrictBool = False
    dtype: Dtype = "float16"
    data: DataRecipe = NormalData()
    tensors: TensorFile | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_kv_heads(self.heads, self.kv_heads)
        fault = _share_fault(self.heads, self.kv_heads, self.tensor_parallel)
        if fault:
            raise fault_at("tensor_parallel", fault)
        if self.local_layers and self.window is None and self.chunk is None:
            raise fault_at("local_layers", f"{self.local_layers} layers have a window or chunk, but neither is set")
        if self.sinks and self.window is None:
            raise fault_at("sinks", f"the {self.sinks} first keys need a window, but there is none")
        if self.data.changes_tensors and self.tensors is None:
            raise fault_at("data", f"{self.data.kind} changes tensors; name some under tensors")
        if self.experts is not None and self.layers is not None and self.experts.dense_layers > self.layers:
            raise fault_at(
                "experts.dense_layers",
                f"{self.experts.dense_layers} dense layers, but the model has only {self.layers}",
            )
        if self.layers is not None and self.local_layers > self.layers:
            raise fault_at("local_layers", f"{self.local_layers} local layers, but the model has only {self.layers}")
        return self

    @property
    def kinds(self) -> dict[LayerKind, int]:
        """Number of layers of each kind; the kind that sees most keys is first."""
        counts: dict[LayerKind, int] = {"global": (self.layers or 1) - self.local_layers, "local": self.local_layers}
        return {kind: count for kind, count in counts.items() if count}

    def problem(
        self, *, kind: LayerKind | None = None, ignore: Collection[str] = (), is_absorbed: bool = False, **asked: Any
    ) -> Problem:
        """Return the problem of one device; every argument replaces a value of the workload.

        Arguments are sizes (`_SIZES`) and other fields of `Problem` (`OF_PROBLEM`); None means not given.  ``seq``
        stands for both ``seq_q`` and ``seq_kv``; ``seq_q=1`` alone is a decoding step over the workload's keys.
        ``lengths``: numbers of keys of sequences of different lengths, in place of ``seq``, ``seq_kv`` and ``batch``;
        without ``seq_q`` each sequence has as many queries as keys.  ``heads``, ``kv_heads`` and the head sizes
        describe one device's share, as the user's tensors do: ``heads`` is not divided.  ``is_absorbed``: queries of a
        decoding step are multiplied with latents directly (W_UK and W_UV are multiplied into Q and into the output
        projection).  ``kind``: the kind of layer, by default the one that sees most keys; ``ignore``: the fields of
        `OPTIONAL` to omit.

        Raises `SpecError` if lengths contradict other arguments, heads cannot be shared among ``tensor_parallel``
        devices (lists the divisors), or the sizes are refused by `Problem`.
        """
        asked = {name: value for name, value in asked.items() if value is not None}
        sized = [name for name in ("seq", "seq_kv", "batch") if name in asked]
        lengths = tuple(asked.get("lengths") or (() if sized else self.lengths))
        if lengths and sized:
            raise SpecError(
                f"{', '.join(sized)}: lengths already state the number of sequences and their sizes; remove it"
            )
        if lengths:
            asked |= {"batch": len(lengths), "seq": max(lengths)}
            queries = asked.get("query_lengths") or self.query_lengths
            asked |= {"seq_q": max(queries)} if queries else {}
        heads, kv_heads = asked.get("heads"), asked.get("heads")
        if heads is None:
            devices = asked.get("tensor_parallel", self.tensor_parallel)
            heads, kv_heads = shared_heads(self.heads, self.kv_heads, devices)
        packed = sum(asked.get("documents") or self.documents)
        sizes: dict[str, Any] = {
            **{name: asked.get(name, getattr(self, name)) for name in ("batch", "head_dim", "causal", "dtype")},
            "heads": heads,
            "kv_heads": asked.get("kv_heads", kv_heads),
            "seq_q": asked.get("seq_q", asked.get("seq", packed or self.seq)),
            "seq_kv": asked.get("seq_kv", asked.get("seq", packed or self.seq_kv or self.seq)),
            "value_head_dim": asked.get("value_head_dim", asked.get("head_dim", self.value_head_dim)),
            "lengths": lengths,
        }
        sizes |= self._of_kind(kind, ignore, {n: value for n, value in asked.items() if n not in _SIZES})
        if self.scale is not None and sizes["head_dim"] == self.head_dim:
            sizes["scale"] = self.scale
        if is_absorbed and self.latent and sizes["seq_q"] < sizes["seq_kv"]:
            sizes |= {"kv_heads": 1, "head_dim": self.latent.width, "value_head_dim": self.latent.kv_lora_rank}
            sizes |= {"values_in_keys": True, "scale": self.scale or self.head_dim**-0.5}
        return Problem.model_validate({**sizes, "data": self.data})

    def _of_kind(
        self, kind: LayerKind | None, ignore: Collection[str], asked: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the visible keys and the functions of scores of a layer: those that the caller requests, else those of
        the layer's kind.
        """
        kind = kind or next(iter(self.kinds))
        if kind not in self.kinds:
            raise SpecError(f"kind: {self.name} has no {kind} layers; allowed: {', '.join(self.kinds)}")
        is_local = kind == "local"
        left_out = set(ignore) if is_local else {*ignore, "window", "chunk"}
        if "window" in left_out:
            left_out.add("sinks")
        stated = {name: getattr(self, name) for name in OF_PROBLEM if name not in left_out}
        return {name: value for name, value in (stated | dict(asked)).items() if value is not None}

    def model(self, attention: Problem, ranks: int, local: Problem | None = None) -> ModelProblem:
        """Return the model on ``ranks`` devices; ``attention``: the attention of one device; ``local``: the attention
        of local layers.

        Raises `SpecError` where the workload does not state a property of a model's layers that is needed.
        """
        missing = [name for name in ("hidden", "layers", "intermediate") if getattr(self, name) is None]
        if missing:
            raise SpecError(f"workload {self.name}: {', '.join(missing)}: missing; the layers of a model need them")
        names = ("hidden", "layers", "intermediate", "gated", "experts", "latent", "tied", "stored")
        sizes = {name: getattr(self, name) for name in names}
        if local is not None and local != attention:
            sizes |= {"local": local, "local_layers": self.local_layers}
        sizes["model_kv_heads"] = self.kv_heads
        return ModelProblem.around(
            attention, ranks=ranks, vocab=self.vocab or 0, parameters=self.parameters or 0, **sizes
        )

    def expanded_cache(self, problem: Problem) -> str:
        """Return the note that K and V are expanded from a latent cache and read again; empty for other caches."""
        if self.latent is None or problem.values_in_keys or problem.seq_q >= problem.seq_kv:
            return ""
        elements = problem.kv_heads * (problem.head_dim + problem.value_head_dim)
        size = problem.kv_bytes()
        return (
            f"latent cache: attention reads expanded K and V, {format_bytes(size)}; the model's cache has "
            f"{format_bytes(size * self.latent.width // elements)} of latents"
        )

    def left_out(self) -> dict[str, str]:
        """Return the features of this attention that npusim does not compute: name -> description."""
        unread = {key: UNREAD.get(key, "a key of its config.json that npusim does not read") for key in self.unread}
        return {name: UNMODELLED[name] for name in self.unmodelled} | unread

    def ignored(self, ignore: Collection[str], models: Collection[str] = ()) -> tuple[str, ...]:
        """Return the features that a run omits, in the words of a table; ``models``: the features that its schedule
        computes.

        Raises `SpecError` for a feature that is not modelled and not in ``ignore``, and for an unknown name in
        ``ignore``.
        """
        known = (*IGNORABLE, *self.unread)
        unknown = [name for name in ignore if name not in known]
        if unknown:
            raise SpecError(f"ignore {', '.join(unknown)}; allowed: {', '.join(known)}")
        parts = {name: what for name, what in self.left_out().items() if name not in models}
        refused = [f"{name} ({what})" for name, what in parts.items() if name not in ignore]
        if refused:
            raise SpecError(
                f"workload {self.name}: {', '.join(refused)}: not modelled; to run without them: --ignore "
                f"{','.join(parts)}"
            )
        stated = {name: getattr(self, name) for name in OPTIONAL if name in ignore}
        computed = tuple(f"{n} ({n if value is True else value})" for n, value in stated.items() if value)
        return (*computed, *(f"{name} ({what})" for name, what in parts.items()))


def shared_heads(heads: int, kv_heads: int, devices: int) -> tuple[int, int]:
    """Return the numbers of query and KV heads of one of ``devices`` (tensor parallel).

    With more devices than KV heads, several devices store the same KV head.  Raises `SpecError` with the divisors if
    the heads cannot be shared equally.
    """
    fault = _share_fault(heads, kv_heads, devices)
    if fault:
        raise SpecError(f"tensor_parallel: {fault}")
    return heads // devices, max(1, kv_heads // devices)


def _share_fault(heads: int, kv_heads: int, devices: int) -> str | None:
    """Return why ``devices`` cannot share the heads equally, or None if they can."""
    if devices < 1:
        return f"{devices} must be greater than 0"
    divisors = divisors_of(heads)
    unfit = [n for n in divisors if kv_heads % n and n % kv_heads]
    note = f" (not with {kv_heads} KV heads: {_joined(unfit)})" if unfit else ""
    if heads % devices:
        return f"{devices} does not divide {heads} query heads; possible: {_joined(divisors)}{note}"
    if devices in unfit:
        fit = _joined([n for n in divisors if n not in unfit])
        return f"{devices} neither divides nor is a multiple of {kv_heads} KV heads; possible: {fit}"
    return None


def _joined(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
