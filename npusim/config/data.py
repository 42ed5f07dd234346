"""Recipes for input tensors: which distribution, with which parameters, from which seed."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from npusim.config.model import NonNegativeInt, PositiveFloat, PositiveInt, SpecModel, StrictFloat

NonNegativeFloat = Annotated[StrictFloat, Field(ge=0)]


class _SeededData(SpecModel):
    changes_tensors: ClassVar[bool] = False
    seed: NonNegativeInt = Field(default=0, description="of the random generator")


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
    # PASA section 3.1, as FlashAttention-3's accuracy test.
    probability: Annotated[StrictFloat, Field(ge=0, le=1)] = 0.001


class SinkData(_SeededData):
    """Scores N(0, 1), and on the first ``sinks`` keys ``gap`` more; V normal (P-Cast, section 3.1).

    Realised in Q and K: every query has length 1/scale in all dimensions but the last, so that its
    scores on normal keys are N(0, 1) exactly; the last dimension carries the gap.
    """

    kind: Literal["sink"]
    gap: StrictFloat = Field(description="what sinks' scores, already scaled, are raised by")
    sinks: PositiveInt = Field(default=4, description="sink tokens, the first keys")


class ResonanceData(_SeededData):
    """Q and K share one wave along the head dimension (PASA, section 3.3.2 and figure 6).

    Row entries are ``amplitude cos(2 pi frequency c / head_dim) + N(0, deviation^2)``; K's wave lags
    by ``phase_degrees``.  Without deviation all entries of Q K^T are query_amplitude key_amplitude
    head_dim / 2 cos(phase): large and positive in phase (0), large and negative out of phase (180).
    """

    kind: Literal["resonance"]
    query_amplitude: PositiveFloat
    key_amplitude: PositiveFloat
    frequency: PositiveInt = Field(description="periods along the head dimension")
    phase_degrees: StrictFloat = Field(description="lag of K's wave behind Q's")
    deviation: NonNegativeFloat = 1.0


class AmplifiedData(SpecModel):
    """Real tensors with the mean of K over the keys amplified: ``K' = (K - mean) + gain mean``.

    What it gives is called amplified, never real; the workload names the tensors.
    """

    changes_tensors: ClassVar[bool] = True
    kind: Literal["amplified"]
    gain: PositiveFloat


# A new recipe is a new member here; its generator stands beside the others in `numerics`.
DataRecipe = Annotated[
    NormalData | UniformData | HybridData | SinkData | ResonanceData | AmplifiedData, Field(discriminator="kind")
]
