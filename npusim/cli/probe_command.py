"""``npusim probe``: inputs that settle a chip's arithmetic, and the device file that follows from its outputs."""

import os
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from npusim.cli import options as o
from npusim.cli.console import late_progress, say, show_either, show_json, write
from npusim.cli.help import Verbs
from npusim.errors import CheckFailedError, SpecError
from npusim.report.text import Block, Column, Columns, Facts, Heading, Style, cells, document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.config.device import DeviceSpec
    from npusim.studies.probe.files import Outputs
    from npusim.studies.probe.overlay import Settled
    from npusim.studies.probe.surviving_units import Survivors

probe = Verbs(
    name="probe",
    no_args_is_help=True,
    help="Find a chip's arithmetic: write probes to run on the chip, and explain its outputs.",
)

_OPEN = 4
_SLOW = "no compiled kernel computes it: products use the exact path, which is 200 to 450 times slower"


def _some(names: "tuple[str, ...]") -> str:
    return ", ".join(names[:_OPEN]) + (f" and {len(names) - _OPEN} more" if len(names) > _OPEN else "")


_COUNTS = (Column("explained", "explained", ",", ">", key="explained"), Column("of", "asked", ",", ">", key="asked"))
ANSWERS = Columns(
    Column("question", "question", key="question"),
    Column("answer", "answer", key="answer"),
    *_COUNTS,
    Column("stays open", "open", _some, key="open"),
)
OPERATIONS = Columns(
    Column(None, "key", key="key"),
    Column("operation", "question", key="question"),
    Column(
        "answer",
        lambda r: _some(r.answers) or f"none; nearest: {r.best}",
        style=lambda r: "" if r.answers else "warn",
        key="answers",
        json=lambda r: r.answers,
    ),
    *_COUNTS,
    Column(None, "best", key="best"),
    Column("", "note", key="note"),
)


@probe.callback()
def root() -> None:
    """Settle a chip's arithmetic."""


@probe.verb(
    "bits",
    ("npusim probe bits --hw ascend_910b2 -o probe/", "then on the chip: python probe/run_torch.py"),
    ("npusim probe bits --cases f16.f32,e4m3.f32 -o probe/", "products with C, for Triton or AscendC"),
)
def bits(
    *,
    out: Annotated[Path, o.option("--out -o FOLDER", "Folder for probes, scripts, and a text on how to run them.")],
    hw: Annotated[
        str | None,
        o.option(
            "--hw DEVICE", "Device file of the chip, which states its formats.", shown="float16, bfloat16, float32"
        ),
    ] = None,
    cases: Annotated[
        str | None,
        o.option(
            "--cases CASE,...",
            "INPUTS.ACCUMULATOR for products with C, INPUTS.ACCUMULATOR.to_RESULT for products without: "
            "f16.f32,f32.f32.to_f32.",
            shown="the device's",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Write inputs that reveal a chip's arithmetic, and scripts that run them: torch, torch_npu, Triton, or by hand.

    Only the framework is needed on the machine with the chip. A format's probes are below 1 MB and 6,000 outputs.
    """
    from npusim.config.load import load_device
    from npusim.studies.probe.files import DEFAULT_CASES, cases_of, folder_contents, others_files

    device = None if hw is None else load_device(hw)
    names, left_out = (DEFAULT_CASES, ()) if device is None else cases_of(device)
    if cases:
        names, left_out = tuple(o.names(cases, "--cases")), ()
    for name in left_out:
        say(f"no probes for {name}: probes for scales, float64, FP6 and FP4 do not exist")
    if not names:
        raise SpecError(f"--hw {hw}: there is no probe for the formats of its matrix units; write --cases f16.f32")
    contents = folder_contents(names, "" if hw is None else hw)
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = others_files(out, contents)
    except OSError as error:
        raise SpecError(f"--out {out}: cannot be created: {error.strerror}") from None
    if others:
        listed = ", ".join(str(file) for file in others)
        raise SpecError(f"--out {out}: {listed} would be overwritten; name another folder, or move the files")
    for name, content in contents.items():
        write(out / name, content)
    if json:
        show_json(document("probe.bits", folder=str(out), cases=list(names), files=list(contents)))
    else:
        say(f"on the chip: python {out}/run_torch.py (or run_triton.py); then: npusim probe identify {out}/outputs.npz")


@probe.verb(
    "identify",
    ("npusim probe identify probe/outputs.npz", "the table, and a device file with the results"),
    ("npusim probe identify probe/outputs.npz --hw mine.yaml -o chip.yaml", "extend another device file"),
    ("npusim probe identify vectors.npz", "only random vectors (A, B, C, D): the arithmetics that agree"),
)
def identify(
    file: Annotated[Path, o.argument("FILE", "Outputs of the probes, or recorded vectors (.npz).")],
    *,
    hw: Annotated[
        str | None, o.option("--hw DEVICE", "Device whose file the new file extends.", shown="the probes' device")
    ] = None,
    out: Annotated[Path | None, o.option("--out -o FILE", "Device file to write.", shown="next to FILE")] = None,
    json: o.Json = False,
) -> None:
    """Identify the arithmetic that explains every output of a chip, and write a device file that states it as measured.

    Open questions are listed. The exit code is 1 if no arithmetic explains some output of a product; this product is
    then not written.
    """
    from npusim.config.load import load_device
    from npusim.simulation.tensor_files import read_tensors
    from npusim.studies.probe.files import read_outputs
    from npusim.studies.probe.overlay import identify as explain

    if any(key.endswith("/D") for key in read_tensors(file)):
        if hw is not None or out is not None:
            raise SpecError("--hw, --out: recorded vectors give no device file; remove these options")
        _identify_vectors(file, is_json=json)
        return
    outputs = read_outputs(file)
    name = hw or outputs.device
    device = load_device(name) if name else None
    with late_progress("identifying") as advance:
        number, total = count(1), len(outputs.products) + len(outputs.vector)
        settled = explain(outputs, device, lambda key: advance(next(number), total, key))
    show_either(json, lambda: _document(settled, outputs.source), lambda: _table(settled, outputs.source))
    if device is None:
        say("--hw DEVICE writes the results as a device file")
    else:
        _write_overlay(settled, outputs, device, name, out)
    if not settled.is_explained:
        raise CheckFailedError(f"{file}: some outputs are unexplained")


def _write_overlay(settled: "Settled", outputs: "Outputs", device: "DeviceSpec", name: str, out: Path | None) -> None:
    from npusim.config.packaged import list_packaged, resolve
    from npusim.studies.probe.overlay import overlay_text, settled_keys

    keys = list(settled_keys(settled, device))
    if not keys:
        say(f"the probes determine nothing about {device.name}, so that npusim writes no file")
        return
    for key, _, words in keys:
        if "another unit" in words:
            say(f"{key}: {words}")
    file = out or outputs.path.with_name(f"{device.name}_measured.yaml")
    is_packaged = name.replace("-", "_") in list_packaged("hwconfigs")
    extends = device.name if is_packaged else os.path.relpath(resolve("device", name).resolve(), file.resolve().parent)
    text = overlay_text(keys, outputs, device, extends, file.stem.replace("-", "_"))
    write(file, text, f"; to use it: npusim run flash --hw {file}")


def _facts(*rows: tuple[str, str, "Style"]) -> Facts:
    """Return labelled lines; lines without text are omitted."""
    return Facts(tuple((label, cells(text, style=style)) for label, text, style in rows if text))


def _table(settled: "Settled", source: str) -> "Iterator[Block]":
    yield Heading("arithmetic that explains a chip's outputs", source)
    for key, (one, long) in settled.products.items():
        style: Style = "good" if one.name else "bad"
        is_slow = one.name is not None and not one.registered
        yield Heading(key, one.name or "unexplained")
        yield ANSWERS.grid([*one.answers, *([long] if long else [])])
        yield _facts(
            ("unit", one.name or "none explains every output", style),
            ("explains", f"{one.explained:,} of {one.asked:,} outputs", style),
            ("equal to", _some(tuple(n for n in one.registered if n != one.name)), ""),
            ("speed", _SLOW * is_slow, ""),
            *(("finding", text, "bad") for text in one.findings),
        )
    if settled.operations:
        yield Heading("vector core", "")
        yield OPERATIONS.grid(settled.operations.values())


def _document(settled: "Settled", source: str) -> dict[str, object]:
    keys = ("name", "registered", "explained", "asked", "findings")
    products = [
        {
            "case": key,
            **{name: getattr(one, name) for name in keys},
            "answers": ANSWERS.records([*one.answers, *([long] if long else [])]),
        }
        for key, (one, long) in settled.products.items()
    ]
    operations = OPERATIONS.records(settled.operations.values())
    return document(
        "probe.identify", source=source, explained=settled.is_explained, products=products, operations=operations
    )


def _identify_vectors(file: Path, *, is_json: bool) -> None:
    from npusim.studies.probe.surviving_units import identify_vectors

    with late_progress("trying units") as advance:
        results = []
        for one in identify_vectors(file):
            results.append(one)
            advance(len(results), 0, one.name)
    show_either(
        is_json,
        lambda: document("probe.vectors", names=[asdict(s) for s in results]),
        lambda: _survivors_table(results),
    )
    if lost := [s.name for s in results if s.matched < s.total]:
        raise CheckFailedError(f"{file}: {', '.join(lost)}: the named arithmetic does not explain every output")


def _survivors_table(found: "list[Survivors]") -> "Iterator[Block]":
    for s in found:
        yield Heading(s.name, f"{s.matched:,} of {s.total:,} outputs")
        yield _facts(
            ("survives", _some(s.registered) or "no registered arithmetic", "" if s.registered else "bad"),
            ("excluded", _some(s.excluded), ""),
            ("units", f"{len(s.units):,} of {s.tried:,} tested arithmetics explain {s.looked_at:,} outputs", ""),
            *((words, _some(values), "warn" if len(values) > 1 else "") for words, values in s.left.items()),
        )
