"""``npusim workload``: models that come with npusim, and import from a Hugging Face config."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from npusim.cli import options as o
from npusim.cli.console import say, show, show_document, show_json
from npusim.cli.help import Verbs, examples
from npusim.errors import SpecError

if TYPE_CHECKING:
    from npusim.config.workload import Workload
    from npusim.report.text import Cell

app = Verbs(
    name="workload",
    no_args_is_help=True,
    help="Models: list them, look into one, import one from a config.json.",
    epilog=examples(
        ("npusim workload show qwen2_7b", "its shapes, and what one device computes"),
        ("npusim workload import config.json --tp 4 -o mine.yaml", "from Hugging Face"),
    ),
)

Name = Annotated[str, o.argument("NAME|FILE", "A packaged workload, or your own .yaml.")]


@app.verb("list", ("npusim workload list --json", "for a script"))
def list_all(json: o.Json = False) -> None:
    """List the workloads that come with npusim."""
    from npusim.config.load import list_workloads, load_workload
    from npusim.report.text import Grid, cells

    loads = [load_workload(name) for name in list_workloads()]
    if json:
        rows = [{"name": w.name, "description": w.description} for w in loads]
        show_document("workload.list", workloads=rows)
        return
    table = []
    for load in loads:
        heads = f"{load.heads}" if load.heads == load.kv_heads else f"{load.heads}/{load.kv_heads}"
        numbers = (heads, str(load.head_dim), str(load.seq), str(load.tensor_parallel))
        table.append(cells(load.name, *numbers, load.description))
    header = ("workload", "heads", "head_dim", "seq", "devices", "description")
    show([Grid(header, "<>>>><", tuple(table))])


@app.verb("show", ("npusim workload show llama2_70b", "sizes and source"))
def show_one(name: Name, json: o.Json = False) -> None:
    """Show a workload, and the problem that one device computes."""
    from npusim.config.load import load_workload
    from npusim.report.tables import problem_text
    from npusim.report.text import Facts, Heading, cells

    load = load_workload(name)
    problem = load.problem().model_dump(mode="json")
    content = load.model_dump(mode="json", by_alias=True, exclude_none=True)
    if json:
        show_document("workload.show", workload=content, problem=problem, not_modelled=load.left_out())
        return
    hidden = ("schema", "name", "description")
    facts = [(key, cells(_text(value))) for key, value in content.items() if key not in hidden]
    facts.append(("one device", cells(problem_text(problem))))
    if load.left_out():
        facts.append(("not modelled", tuple(_not_modelled(load))))
    show([Heading(load.name, load.description), Facts(tuple(facts))])


def _not_modelled(load: "Workload") -> "list[Cell]":
    """Return what runs of this workload refuse to leave out unasked, and how to ask."""
    from npusim.report.text import Cell

    left_out = load.left_out()
    found = [Cell(f"{name}: {what}", "warn") for name, what in left_out.items()]
    return [*found, Cell(f"to run without: --ignore {','.join(left_out)}")] if found else []


def _text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={inner}" for key, inner in value.items() if inner != "")
    return str(value).lower() if isinstance(value, bool) else str(value)


@app.verb("schema", ("npusim workload schema > workload.schema.json", "for your editor"))
def schema() -> None:
    """Print the JSON Schema of workload files."""
    from npusim.config.workload import Workload

    show_json(Workload.model_json_schema())


@app.verb(
    "import",
    ("npusim workload import config.json", "print the workload"),
    ("npusim workload import config.json --tp 8 --seq 8192 -o mine.yaml", "write it"),
    ("npusim run flash -w mine.yaml", "and run it"),
)
def import_one(
    config: Annotated[Path, o.argument("CONFIG", "A model's config.json.")],
    *,
    tensor_parallel: Annotated[int, o.option("--tensor-parallel --tp N", "Devices that share the heads.", min=1)] = 1,
    seq: Annotated[
        int | None, o.option("--seq TOKENS", "Default length of a run: 8k.", parser=o.count("--seq"))
    ] = None,
    batch: Annotated[int, o.option("--batch N", "Sequences.", min=1)] = 1,
    name: Annotated[str | None, o.option("--name TEXT", "Of the workload.")] = None,
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"] | None,
        o.option("--dtype", "Of Q, K and V.", shown="the config's, or float16"),
    ] = None,
    out: Annotated[Path | None, o.option("--out -o FILE", "File to write.", shown="stdout")] = None,
    json: o.Json = False,
) -> None:
    """Make a workload from a model's Hugging Face config.json."""
    from npusim.config.huggingface import import_config, workload_yaml

    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise SpecError(f"--out {out}: workload files end in .yaml")
    load = import_config(config, tensor_parallel=tensor_parallel, seq=seq, batch=batch, name=name, dtype=dtype)
    if json:
        content = load.model_dump(mode="json", by_alias=True, exclude_none=True)
        show_document("workload.import", workload=content, not_modelled=load.left_out())
    if out is not None:
        from npusim.report.output import write_whole

        write_whole(out, workload_yaml(load).encode())
        say(f"wrote {out}  (npusim run flash -w {out})")
    elif not json:
        typer.echo(workload_yaml(load), nl=False)
    for cell in _not_modelled(load):
        say(f"not modelled: {cell.text}" if cell.style else cell.text)
