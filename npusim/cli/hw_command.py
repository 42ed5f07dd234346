"""``npusim hw`` and ``npusim workload``: packaged devices and models, and your own files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from npusim.cli import options as o
from npusim.cli.console import say, show_either, show_json, write
from npusim.cli.help import Verbs, examples
from npusim.errors import NpusimError, SpecError
from npusim.report.text import Facts, cells, document
from npusim.simulation.request import refuse

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.node_file import NodeSpec
    from npusim.config.workload import Workload

hw = Verbs(
    name="hw",
    no_args_is_help=True,
    help="Devices: list them, show one, check your own file.",
    epilog=examples(
        ("npusim hw show ascend_910b2", "every number with its unit and basis"),
        ("npusim hw validate my_910.yaml", "faults with file and line"),
    ),
)
workload = Verbs(
    name="workload",
    no_args_is_help=True,
    help="Models: list them, show one, import one from a config.json.",
    epilog=examples(
        ("npusim workload show qwen2_7b", "its shapes, and one device's share of them"),
        ("npusim workload import config.json --tp 4 -o mine.yaml", "from Hugging Face"),
    ),
)


@hw.verb("list", ("npusim hw list --json", "for a script"))
def list_devices(json: o.Json = False) -> None:
    """List the packaged devices, and the nodes of several devices."""
    from npusim.config import load, node_file
    from npusim.config.packaged import broken_entries
    from npusim.report.run_inputs import DEVICES

    for broken in broken_entries():
        say(f"npusim: {broken}; its devices are omitted")
    devices: list[DeviceSpec | NodeSpec] = [load.load_device(name) for name in load.list_devices()]
    devices += [node_file.load_node(name) for name in node_file.list_nodes()]
    show_either(json, lambda: document("hw.list", devices=DEVICES.records(devices)), lambda: [DEVICES.grid(devices)])


@hw.verb(
    "show",
    ("npusim hw show ascend_910b2", "all of it"),
    ("npusim hw show h200 --sources", "the source of each number"),
    ("npusim hw show ascend_910b2 --only links", "keys that start with links"),
    ("npusim hw show my_910.yaml --basis assumed", "the numbers that are assumptions"),
)
def show_device(
    name: Annotated[str, o.argument("NAME|FILE", "A packaged device or node, or your own .yaml.")],
    only: Annotated[str, o.option("--only KEY", "Show only keys that start with this.", shown=False)] = "",
    basis: Annotated[
        str | None,
        o.option("--basis BASIS", "Show only numbers with this basis: vendor, measured, derived, fitted or assumed."),
    ] = None,
    sources: Annotated[bool, o.option("--sources", "Also show the source of each number.")] = False,
    overrides: Annotated[list[str] | None, o.request_option("overrides")] = None,
    json: o.Json = False,
) -> None:
    """Show the numbers of a device as a tree, each with its unit and basis; -C changes a number by its dotted key."""
    from npusim.config.node_file import load_machine
    from npusim.report.device_tree import device_table

    device = load_machine(name, o.key_values(overrides, "-C"), _unread_keys)
    if json:
        refuse(
            {"--only": only or None, "--basis": basis, "--sources": sources or None},
            "--json prints every number; remove these options",
        )
    show_either(
        json,
        lambda: document("hw.show", digest=device.digest(), device=device.model_dump(mode="json", by_alias=True)),
        lambda: device_table(device, only, basis, has_sources=sources),
    )


def _unread_keys(family: str) -> "Mapping[str, str]":
    """Return `define.unread_keys`, imported only if a number is changed, because the import takes a second."""
    from npusim.kernels.declare.define import unread_keys

    return unread_keys(family)


@hw.verb("schema", ("npusim hw schema > hw.schema.json", "for your editor"))
def print_device_schema() -> None:
    """Print the JSON Schema of hardware files."""
    from npusim.config.device import DeviceSpec

    show_json(DeviceSpec.model_json_schema())


@hw.verb("validate", ("npusim hw validate a.yaml b.yaml", "exit code 2 if a file is faulty"))
def validate_devices(
    files: Annotated[list[str], o.argument("FILE...", "Hardware files.")], json: o.Json = False
) -> None:
    """Check hardware files; name each fault with file and line."""
    from npusim.config.node_file import load_machine
    from npusim.report.run_inputs import device_summary

    faults: dict[str, list[str]] = {}
    facts = []
    for file in files:
        try:
            machine = load_machine(file)
            for unit in machine.matrix_engines.values():
                list(map(unit.arithmetic_of, unit.arithmetic))
            facts.append((file, cells(f"ok: {device_summary(machine)}", style="good")))
        except NpusimError as error:
            faults[file] = str(error).splitlines()
            facts.append((file, cells(*faults[file], style="bad")))
    listed = [{"file": f, "valid": f not in faults, "faults": faults.get(f, [])} for f in files]
    show_either(json, lambda: document("hw.validate", files=listed), lambda: [Facts(tuple(facts))])
    if faults:
        raise SpecError(f"faulty files: {len(faults)} of {len(files)}")


@workload.verb("list", ("npusim workload list --json", "for a script"))
def list_workloads(json: o.Json = False) -> None:
    """List the packaged workloads."""
    from npusim.config import load
    from npusim.report.run_inputs import WORKLOADS

    workloads = [load.load_workload(name) for name in load.list_workloads()]
    show_either(
        json,
        lambda: document("workload.list", workloads=WORKLOADS.records(workloads)),
        lambda: [WORKLOADS.grid(workloads)],
    )


@workload.verb("show", ("npusim workload show llama2_70b", "sizes and source"))
def show_workload(
    name: Annotated[str, o.argument("NAME|FILE", "A packaged workload, or your own .yaml.")], json: o.Json = False
) -> None:
    """Show a workload, and the problem that one device computes."""
    from npusim.config.load import load_workload
    from npusim.report.run_inputs import workload_table

    load = load_workload(name)
    show_either(
        json,
        lambda: _workload_document("show", load, problem=load.problem().model_dump(mode="json")),
        lambda: workload_table(load),
    )


def _workload_document(verb: str, load: "Workload", **content: Any) -> dict[str, object]:
    sizes = load.model_dump(mode="json", by_alias=True, exclude_none=True)
    return document(f"workload.{verb}", workload=sizes, **content, not_modelled=load.left_out())


@workload.verb("schema", ("npusim workload schema > workload.schema.json", "for your editor"))
def print_workload_schema() -> None:
    """Print the JSON Schema of workload files."""
    from npusim.config.workload import Workload

    show_json(Workload.model_json_schema())


@workload.verb(
    "import",
    ("npusim workload import config.json", "print the workload"),
    ("npusim workload import config.json --tp 8 --seq 8192 -o mine.yaml", "write it"),
    ("npusim run flash -w mine.yaml", "and run it"),
)
def import_workload(
    config: Annotated[Path, o.argument("CONFIG", "A model's config.json.")],
    *,
    tensor_parallel: Annotated[
        int, o.option("--tensor-parallel --tp N", "Number of devices that share the heads.", min=1)
    ] = 1,
    seq: Annotated[
        int | None, o.option("--seq TOKENS", "Default number of tokens of a run: 8k.", parser=o.count("--seq"))
    ] = None,
    batch: Annotated[int, o.option("--batch N", "Number of sequences.", min=1)] = 1,
    name: Annotated[str | None, o.option("--name TEXT", "Name of the workload.")] = None,
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"] | None,
        o.option("--dtype", "Format of Q, K and V.", shown="the config's, else float16"),
    ] = None,
    out: Annotated[Path | None, o.option("--out -o FILE", "File to write.", shown="stdout")] = None,
    json: o.Json = False,
) -> None:
    """Make a workload from a model's Hugging Face config.json."""
    from npusim.config.huggingface import import_config, workload_yaml
    from npusim.report.run_inputs import not_modelled, read_as

    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise SpecError(f"--out {out}: workload files end in .yaml")
    load = import_config(config, tensor_parallel=tensor_parallel, seq=seq, batch=batch, name=name, dtype=dtype)
    if json:
        show_json(_workload_document("import", load))
    if out is not None:
        write(out, workload_yaml(load), f"  (npusim run flash -w {out})")
    elif not json:
        typer.echo(workload_yaml(load), nl=False)
    say(f"read as: {read_as(load)}")
    for cell in not_modelled(load):
        say(f"not modelled: {cell.text}" if cell.style else cell.text)
