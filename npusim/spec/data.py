"""Recipes for input tensors: which distribution, with which parameters, from which seed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from npusim.spec.model import NonNegativeInt, SpecModel, StrictFloat


class _SeededData(SpecModel):
    seed: NonNegativeInt = Field(default=0, description="of the random generator")


class NormalData(_SeededData):
    """Independent normal entries of Q, K and V."""

    kind: Literal["normal"] = "normal"
    mean: StrictFloat = 0.0
    deviation: Annotated[StrictFloat, Field(gt=0)] = 1.0


class UniformData(_SeededData):
    """Independent entries, uniform in ``[x0 - amplitude, x0 + amplitude]`` (the PASA paper)."""

    kind: Literal["uniform"]
    x0: StrictFloat
    amplitude: Annotated[StrictFloat, Field(ge=0)]


# A new recipe is a new member here; its generator stands beside the others in `numerics`.
DataRecipe = Annotated[NormalData | UniformData, Field(discriminator="kind")]
