"""Manifests of core families: npusim's own are complete, and one that misses or contradicts something is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest

import npusim
from npusim.config.family import FAMILIES, CoreFamily, Kind, registered, running
from npusim.config.tiling import Blocks, Field, Tiling
from npusim.errors import SpecError
from npusim.kernels.attention.online_softmax import FlashPrecision
from npusim.kernels.declare.define import machine_class, schedule
from npusim.kernels.declare.registry import as_family
from npusim.library import SCHEDULES, find_schedule
from npusim.machines.base import Machine
from npusim.machines.published_kernel import PublishedKernel
from npusim.machines.published_kernels import kernels


class Undecided(NamedTuple):
    """Decisions of which one has no default."""

    depth: int


@pytest.mark.parametrize("name", FAMILIES)
def test_a_manifest_of_the_package_is_complete(name: str) -> None:
    family = registered(name)
    assert family.name == name
    assert issubclass(machine_class(name), Machine)
    assert family.decisions is not None
    assert family.decisions()
    assert all((cls := family.fields_of(kind)) is None or issubclass(cls, Tiling) for kind in family.fields)


@pytest.mark.parametrize("name", FAMILIES)
def test_settings_name_fields_of_the_familys_schedules(name: str) -> None:
    """A run leaves out fields that its schedule does not have: a misspelt one would have no effect."""
    known = {n for called, of in SCHEDULES if of == name for n in find_schedule(called, of).tiling.model_fields}
    groups = [group for groups in registered(name).settings.values() for group in groups]
    assert {n for group in groups for setting in group for n in setting} <= known


def test_each_kind_of_kernel_is_one_that_a_family_runs() -> None:
    assert all(running(kind) for kind in get_args(Kind))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "core family without a name: name: missing; it is the name of the family in device files"),
        ({"machine": ""}, "core family mine: machine: missing; a class of npusim.machine.Machine, or module:Name"),
        ({"machine": "mine"}, "machine: mine; a class of npusim.machine.Machine, or module:Name"),
        ({"processor": "gpus"}, "processor: 'gpus' is not allowed. Did you mean `gpu`"),
        ({"fields": {"atention": ""}}, "fields: 'atention' is not allowed. Did you mean `attention`"),
        ({"presets": {"sum_oder": ""}}, "presets: 'sum_oder' is not allowed. Did you mean `sum_order`"),
        ({"sole": ("aic",), "cores": ("core",)}, "sole: 'aic' is not allowed"),
        ({"parts": ("flag",)}, "parts: 'flag' is not allowed. Did you mean `flags`"),
        ({"unread": {"cores.sm.engines.*": "x"}, "cores": ("core",)}, "its devices have no cores.sm"),
        ({"decisions": Undecided}, "decisions: Undecided is not a named tuple whose fields all have defaults"),
        ({"decisions": int}, "decisions: int is not a named tuple whose fields all have defaults"),
        ({"settings": {"attention": [{"depth": 1}]}}, "settings: attention: must be groups of mappings"),
    ],
)
def test_a_manifest_that_misses_or_contradicts_something_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"name": "mine", "machine": "mine:Machine", **changes}
    with pytest.raises(SpecError) as error:
        CoreFamily(**given)
    assert message in str(error.value)


def test_a_value_that_no_preset_takes_is_refused() -> None:
    family = CoreFamily(name="mine", machine="mine:Machine", presets={"accumulate": "frsh"})
    with pytest.raises(SpecError, match=r"core family mine: presets: accumulate: 'frsh' is not allowed. Did you mean"):
        as_family(FlashPrecision("fa2"), family)


def test_fields_that_are_no_tiling_are_refused() -> None:
    family = CoreFamily(name="mine", machine="mine:Machine", fields={"rows": "npusim.errors:SpecError"})
    with pytest.raises(SpecError, match=r"core family mine: fields of 'rows': npusim.errors:SpecError is not a Tiling"):
        family.fields_of("rows")
    with pytest.raises(SpecError, match="core family mine runs no kernels of the kind 'attention'"):
        family.fields_of("attention")


@pytest.mark.parametrize(("hw", "other"), [("ascend_910b2", "sm"), ("h200", "ascend")])
def test_a_run_imports_the_machine_of_its_device_alone(hw: str, other: str, tmp_path: Path) -> None:
    script = f"""
import sys
import npusim
for schedule in ("flash", "pasa"):
    npusim.run(schedule, hw={hw!r}, seq=128, numerics=False, trace_groups=())
print([m for m in sys.modules if m.startswith("npusim.machines.{other}.")])
"""
    paths = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=paths, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]"], done.stderr


def test_a_kernel_decides_by_the_tuple_of_a_family() -> None:
    decided = {type(kernel.decides) for kernel in kernels(PublishedKernel).values()}
    assert decided == {registered(name).decisions for name in FAMILIES}


def test_a_schedule_called_as_another_familys_kernel_does_not_compute_as_that(tmp_path: Path) -> None:
    """FlashAttention-2's and -3's kernels scale in the exponent's multiply-add; no Ascend kernel does."""
    file = tmp_path / "own.py"
    lines = "from npusim.kernel import FlashPrecision, attention, flash"
    lines += "\n{0} = attention('{0}', flash, precisions=[FlashPrecision('p', exp_variant='exp2.correct')])\n"
    outputs = []
    for name in ("fa3", "mine"):
        file.write_text(lines.format(name), encoding="utf-8")
        call: dict[str, Any] = {"seq": 128, "rows": "all", "seed": 1, "trace_groups": ()}
        outputs.append(npusim.run(f"{file}:{name}", hw="ascend_910b2", **call).output)
    assert np.array_equal(*(output.view(np.uint16) for output in outputs))


class Deep(Blocks):
    """A kernel's fields, of which one is the machine's too."""

    depth: int = Field(default=1, ge=0, description="tiles ahead")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"usual": {"dept": 1}}, "schedule mine: usual: no machine has the field 'dept'. Did you mean `depth`?"),
        (
            {"tiling": Deep},
            "schedule mine: field 'depth' is already a field of ascend's machine; set its default with usual=",
        ),
    ],
)
def test_fields_of_a_kernel_and_its_machine_are_told_apart(given: dict[str, Any], message: str) -> None:
    wrong = schedule("mine", lambda *_: [], precisions=[FlashPrecision("p")], kind="stages", **given)
    with pytest.raises(SpecError) as error:
        _ = wrong[0].tiling
    assert message in str(error.value)


def test_a_default_of_a_machines_field_holds_where_there_is_one() -> None:
    made = schedule("mine", lambda *_: [], precisions=[FlashPrecision("p")], kind="stages", usual={"depth": 1})
    of = {one.family: one.tiling.model_fields for one in made}
    assert of["ascend"]["depth"].default == 1
    assert "depth" not in of["nvidia"]
    assert find_schedule("pasa", "ascend").tiling.model_fields["depth"].default == 2
