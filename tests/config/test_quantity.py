from __future__ import annotations

import typing

import pytest
from pydantic import BaseModel, ValidationError

from npusim.config import core_units, device
from npusim.config.load import list_devices, load_device
from npusim.config.quantity import Choice, Quantity, WholeQuantity, has_unit


@pytest.mark.parametrize("key", ["clock_hz", "bytes_per_cycle", "slope_cycles_per_repeat"])
def test_keys_that_end_in_a_unit_have_one(key: str) -> None:
    assert has_unit(key)


@pytest.mark.parametrize("key", ["clock", "capacity", "bandwidth_gbs", "latency", "hzz"])
def test_other_keys_have_none(key: str) -> None:
    assert not has_unit(key)


def test_every_number_of_every_model_has_its_unit_in_its_key() -> None:
    def is_quantity(annotation: object) -> bool:
        if isinstance(annotation, type):
            return issubclass(annotation, Quantity)
        return any(is_quantity(part) for part in typing.get_args(annotation))

    names = [
        f"{model.__name__}.{name}"
        for module in (device, core_units)
        for model in vars(module).values()
        if isinstance(model, type) and issubclass(model, BaseModel)
        for name, field in model.model_fields.items()
        if is_quantity(field.annotation) and not has_unit(name)
    ]
    assert names == []


@pytest.mark.parametrize("name", list_devices())
def test_every_number_of_every_device_has_unit_basis_and_source(name: str) -> None:
    facts = list(load_device(name).quantities())
    assert len(facts) > 20
    for key, quantity in facts:
        # A table by name (an instruction's generation) has the unit in its own key.
        assert any(has_unit(part) for part in key.split(".")[-2:]), key
        assert quantity.basis
        assert len(quantity.source) > 3, key


def test_a_fitted_value_names_its_cases() -> None:
    fitted = Quantity(value=1.5, basis="fitted", source="fit", fitted_on=("fa_910b2_1k",))
    assert fitted.fitted_on == ("fa_910b2_1k",)
    with pytest.raises(ValidationError, match="fitted_on"):
        Quantity(value=1.5, basis="fitted", source="fit")
    with pytest.raises(ValidationError, match="fitted_on"):
        Quantity(value=1.5, basis="vendor", source="ini", fitted_on=("x",))


@pytest.mark.parametrize("value", [True, "1", float("nan"), float("inf"), -1, None, 10**400])
def test_values_that_are_no_finite_number_are_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        Quantity.model_validate({"value": value, "basis": "vendor", "source": "x"})


def test_whole_quantities_refuse_fractions_and_keep_integers() -> None:
    facts = {"basis": "vendor", "source": "x"}
    assert type(WholeQuantity.model_validate({"value": 2**36, **facts}).value) is int
    with pytest.raises(ValidationError, match="whole"):
        WholeQuantity.model_validate({"value": 2.0, **facts})


def test_quantities_and_choices_are_frozen_and_hashable() -> None:
    quantity = Quantity(value=1, basis="vendor", source="x")
    choice = Choice[str](value="a", basis="assumed", source="x")
    assert {quantity: 1, choice: 2}[quantity] == 1
    with pytest.raises(ValidationError, match="frozen"):
        quantity.value = 2  # type: ignore[misc]
