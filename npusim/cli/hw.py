"""``npusim hw``: devices that come with npusim, and files of one's own."""

from typing import TYPE_CHECKING, Annotated

from npusim.cli import options as o
from npusim.cli.console import say, show, show_document, show_json
from npusim.cli.help import Verbs, examples
from npusim.errors import SpecError
from npusim.simulation.request import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.device import DeviceSpec
    from npusim.config.node import NodeSpec

app = Verbs(
    name="hw",
    no_args_is_help=True,
    help="Devices: list them, look into one, check your own file.",
    epilog=examples(
        ("npusim hw show ascend_910b2", "every number with its source"),
        ("npusim hw validate my_910.yaml", "faults with file and line"),
    ),
)

Name = Annotated[str, o.argument("NAME|FILE", "A packaged device or node, or your own .yaml.")]


@app.verb("list", ("npusim hw list --json", "for a script"))
def list_all(json: o.Json = False) -> None:
    """List the devices that come with npusim, and the nodes of several."""
    from npusim.config.load import list_devices, load_device
    from npusim.config.node import list_nodes, load_node
    from npusim.config.packaged import broken_entries
    from npusim.report.text import Grid, cells

    for broken in broken_entries():
        say(f"npusim: {broken}; its devices are left out")
    devices: list[DeviceSpec | NodeSpec] = [load_device(name) for name in list_devices()]
    devices += [load_node(name) for name in list_nodes()]
    if json:
        rows = [
            {"name": d.name, "family": d.family, "description": d.description, "digest": d.digest()} for d in devices
        ]
        show_document("hw.list", devices=rows)
        return
    table = tuple(cells(d.name, d.family, d.description) for d in devices)
    show([Grid(("device", "family", "description"), "<<<", table)])


@app.verb(
    "show",
    ("npusim hw show ascend_910b2", "all of it"),
    ("npusim hw show ascend_910b2 --only links", "keys that start so"),
    ("npusim hw show my_910.yaml --basis assumed", "what rests on assumptions"),
)
def show_one(
    name: Name,
    only: Annotated[str, o.option("--only KEY", "Keys that start with this.", shown=False)] = "",
    basis: Annotated[str | None, o.option("--basis BASIS", "vendor, measured, derived, fitted or assumed.")] = None,
    overrides: Annotated[list[str] | None, o.request_option("overrides")] = None,
    json: o.Json = False,
) -> None:
    """Show every number of a device with its basis and source."""
    from npusim.config.node import load_machine

    device = load_machine(name, o.key_values(overrides, "-C"), _unread_keys)
    if json:
        refuse({"--only": only or None, "--basis": basis}, "--json has every number; leave these options out")
        show_document("hw.show", digest=device.digest(), device=device.model_dump(mode="json", by_alias=True))
        return
    _show(device, only, basis)


def _show(device: "DeviceSpec", only: str, basis: str | None) -> None:
    from npusim.config.device_tables import validated_schedules
    from npusim.config.messages import suggest
    from npusim.config.quantity import BASES
    from npusim.report.text import Cell, Facts, Grid, Heading, cells

    if basis is not None and basis not in BASES:
        raise SpecError(f"--basis {basis}{suggest(basis, BASES)}")
    rows = []
    for key, fact in device.facts():
        if not key.startswith(only) or basis not in (None, fact.basis):
            continue
        value = getattr(fact, "value", "")
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        basis_cell = Cell(fact.basis, "warn" if fact.basis in ("assumed", "fitted") else "")
        rows.append((Cell(key), Cell(text), basis_cell, Cell(fact.source, "dim")))
    if not rows:
        where = f" under --only {only!r}" if only else ""
        raise SpecError(f"{device.name} has no number{where}{f' of basis {basis}' if basis else ''}")
    held = [v.text(schedule, device.name) for schedule, v in validated_schedules(device).items()]
    show(
        [
            Heading(device.name, f"{device.description}; file {device.digest()}"),
            Grid(("key", "value", "basis", "source"), "<><<", tuple(rows)),
            *([] if only or basis else [Facts((("measured", cells(*held or ["no measurement: predicted only"])),))]),
        ]
    )


@app.verb("schema", ("npusim hw schema > hw.schema.json", "for your editor"))
def schema() -> None:
    """Print the JSON Schema of hardware files."""
    from npusim.config.device import DeviceSpec

    show_json(DeviceSpec.model_json_schema())


@app.verb("validate", ("npusim hw validate a.yaml b.yaml", "exit code 2 if one is faulty"))
def validate(files: Annotated[list[str], o.argument("FILE...", "Hardware files.")], json: o.Json = False) -> None:
    """Check hardware files; name each fault with file and line."""
    from npusim.config.node import load_machine
    from npusim.report.text import Cell, Facts

    faults: dict[str, list[str]] = {}
    facts = []
    for file in files:
        try:
            device = load_machine(file)
        except SpecError as error:
            faults[file] = str(error).splitlines()
            facts.append((file, tuple(Cell(line, "bad") for line in faults[file])))
        else:
            facts.append((file, (Cell(f"ok: {_summary(device)}", "good"),)))
    if json:
        found = [{"file": f, "valid": f not in faults, "faults": faults.get(f, [])} for f in files]
        show_document("hw.validate", files=found)
    else:
        show([Facts(tuple(facts))])
    if faults:
        raise SpecError(f"{len(faults)} of {len(files)} files are faulty")


def _summary(device: "DeviceSpec") -> str:
    bases: dict[str, int] = {}
    for _, fact in device.facts():
        bases[fact.basis] = bases.get(fact.basis, 0) + 1
    numbers = ", ".join(f"{count} {basis}" for basis, count in bases.items())
    return f"{device.name}, {numbers}, digest {device.digest()}"


def _unread_keys(family: str) -> "Mapping[str, str]":
    """Return `schedules.unread_keys`, which are imported only where a number is changed: that takes a second."""
    from npusim.schedules import unread_keys

    return unread_keys(family)
