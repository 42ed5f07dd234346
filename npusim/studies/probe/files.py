"""A folder of probes for a chip, and the chip's outputs."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import NpusimError, TensorError
from npusim.formats import cast, get_arithmetic, get_format
from npusim.formats.cast import widen
from npusim.simulation.tensor_files import read_tensors
from npusim.studies.probe import vector
from npusim.studies.probe.questions import LONG_K, K, ProbeCase, Probes, case_name, probes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.formats.cast import Array

FORM = "npusim.probes/1"
#: Cases of a probe for no named device: torch's products, without and with C.
DEFAULT_CASES = ("f16.f32.to_f16", "bf16.f32.to_bf16", "f32.f32.to_f32", "f16.f32", "bf16.f32")


def cases_of(device: DeviceSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the cases of a device's matrix units, and the arithmetics for which there are no probes.

    Each pair of formats is probed with C, and without C as torch's products are.
    """
    cases: dict[str, None] = {}
    names = dict.fromkeys(str(choice.value) for choice in device.arithmetic_choices.values())
    left_out: list[str] = []
    for name in names:
        a = get_arithmetic(name)
        if a.scale_block or a.acc.bits > 32 or min(a.a.bits, a.b.bits) < 8:
            left_out.append(name)
            continue
        cases[case_name(a.a_format, a.b_format, a.acc_format)] = None
        if a.a_format == a.b_format and a.a.bits >= 16 and a.a_format != "tf32":
            cases[case_name(a.a_format, a.b_format, a.acc_format, a.a_format)] = None
    return tuple(cases), tuple(left_out)


def encoded(x: Array, fmt: str) -> Array:
    """Return exact float64 values as bit patterns."""
    f = get_format(fmt)
    pattern: Array = np.ascontiguousarray(cast(x.astype(np.float32), f)).view(f.bits_dtype)
    return pattern


def decoded(bits: Array, fmt: str) -> Array:
    """Return bit patterns as float64 values."""
    f = get_format(fmt)
    return np.asarray(widen(np.ascontiguousarray(bits).view(f.dtype)), np.float64)


def probes_archive(names: Sequence[str], device: str = "", *, with_vector: bool = True) -> bytes:
    """Return ``probes.npz``: bit patterns of all probes, their questions, and the data that a script needs about
    them.
    """
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {"form": FORM, "device": device, "without_c": {}, "with_c": {}, "vector": {}, "inputs": {}}
    for case in (ProbeCase(ProbeCase.of(name).name, depth) for name in names for depth in (K, LONG_K)):
        p, (a, b, _) = probes_of(case), case.formats
        stored = {"a": encoded(p.a, a.name), "b": encoded(p.b, b.name), "question": p.question, "note": p.note}
        if case.has_c:
            stored["c"] = encoded(p.c, case.out.name)
        arrays |= {f"{case.key}/{role}": array for role, array in stored.items()}
        facts["with_c" if case.has_c else "without_c"][case.key] = (a.name, b.name, case.out.name)
    if with_vector:
        for key, array in vector.inputs().items():
            arrays[key] = array.view(f"u{array.itemsize}")
        for key, one in vector.cases().items():
            facts["vector"][key] = (one.operation, one.fmt, one.out)
            facts["inputs"][key] = one.inputs
    buffer = BytesIO()
    np.savez_compressed(buffer, facts=np.array(json.dumps(facts)), **arrays)
    return buffer.getvalue()


def folder_contents(names: Sequence[str], device: str = "") -> dict[str, bytes]:
    """Return the files of a folder of probes by name; raise `FormatError` for a case with an unknown format."""
    scripts = {"run_torch.py": "run_torch.txt", "run_triton.py": "run_triton.txt", "README.md": "folder.txt"}
    packaged = {name: (files("npusim.studies.probe") / source).read_bytes() for name, source in scripts.items()}
    return {"probes.npz": probes_archive(names, device), **packaged}


def others_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Return those existing files with names in ``contents`` that npusim did not write: they neither have these
    contents nor are probes.
    """
    existing = [folder / name for name in contents if os.path.lexists(folder / name)]
    return [f for f in existing if not (f.is_file() and (f.read_bytes() == contents[f.name] or _is_probes(f)))]


def _is_probes(file: Path) -> bool:
    try:
        return file.suffix == ".npz" and _facts(file, read_tensors(file)).get("form") == FORM
    except NpusimError:
        return False


@dataclass(frozen=True)
class Outputs:
    """The results of a chip: by case its probes and D (n, tile), by operation its inputs and results."""

    path: Path
    facts: Mapping[str, str]
    device: str
    products: Mapping[str, tuple[Probes, Array]]
    vector: Mapping[str, tuple[vector.VectorCase, tuple[Array, ...], Array]]
    sha256: str

    @property
    def source(self) -> str:
        """The origin of the outputs, in words."""
        words = (f"{self.facts[n]}" for n in ("date", "chip", "framework") if self.facts.get(n))
        return f"{', '.join(words)}; {self.path.name} sha256 {self.sha256[:16]}"


def read_outputs(path: Path) -> Outputs:
    """Return the outputs of a chip, with the probes.npz that is in the same folder.

    Raises `TensorError` if a file is missing or damaged, if the outputs belong to other probes, or if a key, dtype or
    shape does not match; the message names file and key.
    """
    arrays = read_tensors(path)
    probes_path = path.parent / "probes.npz"
    probes = read_tensors(probes_path)
    facts, asked = _facts(path, arrays), _facts(probes_path, probes)
    if asked.get("form") != FORM:
        raise TensorError(f"{probes_path}: form is {asked.get('form')!r}; must be {FORM!r}")
    digest = hashlib.sha256(probes_path.read_bytes()).hexdigest()
    if (stated := str(facts.get("probes", digest))) != digest:
        text = f"outputs of probes other than those in {probes_path}: sha256 {stated[:16]}, not {digest[:16]}"
        raise TensorError(f"{path}: {text}")
    try:
        products, operations = _read_all(path, arrays, probes, asked)
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise TensorError(f"{probes_path}: the file differs from what npusim probe bits wrote: {error}") from None
    if not products and not operations:
        raise TensorError(f"{path}: no outputs; a product's key is CASE/d, an operation's OPERATION/o")
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    return Outputs(path, facts, asked.get("device", ""), products, operations, content)


def _read_all(
    path: Path, arrays: Mapping[str, Any], probes: Mapping[str, Any], asked: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the products and operations of a file of outputs."""
    products: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    known = {**asked["with_c"], **asked["without_c"]}
    for key, array in arrays.items():
        name, _, role = key.rpartition("/")
        if role == "d" and name in known:
            products[name] = _products(path, name, array, probes)
        elif role == "o" and name in asked["vector"]:
            operation, fmt, out = asked["vector"][name]
            case = vector.VectorCase(operation, fmt, tuple(asked["inputs"][name]), out)
            inputs = tuple(np.ascontiguousarray(probes[n]).view(get_format(fmt).dtype) for n in case.inputs)
            rows = inputs[0].shape[:1]
            operations[name] = (case, inputs, _of(path, key, array, out, rows))
        elif key != "facts":
            raise TensorError(f"{path}: {key}: unknown key; the probes ask for {', '.join([*known][:4])}, ... with /d")
    return products, operations


def _facts(path: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
    if "facts" not in arrays:
        return {}
    try:
        read = json.loads(str(arrays["facts"]))
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise TensorError(f"{path}: facts: not the JSON text of a mapping")
    return read


def _of(path: Path, key: str, array: Array, fmt: str, rows: tuple[int, ...]) -> Array:
    """Return an output's patterns as unsigned integers; raise `TensorError` for another width or length."""
    f = get_format(fmt)
    if array.dtype.kind not in "iuf" or array.dtype.itemsize != f.size_bytes or array.shape[:1] != rows:
        raise TensorError(
            f"{path}: {key} is {array.shape} of {array.dtype}; needs {rows[0]} rows of {fmt}, as {f.bits_dtype}"
        )
    return np.ascontiguousarray(array).view(f.bits_dtype)


def _products(path: Path, name: str, array: Array, probes: Mapping[str, Array]) -> tuple[Probes, Array]:
    case = ProbeCase.of(name)
    a, b = (decoded(probes[f"{name}/{role}"], f.name) for role, f in zip("ab", case.formats, strict=False))
    c = decoded(probes[f"{name}/c"], case.out.name) if case.has_c else np.zeros(len(a))
    d = _of(path, f"{name}/d", array, case.out.name, (len(a),))
    if d.ndim == 1:
        d = d[:, None]
    if d.ndim != 2 or not d.shape[1] or len(d) % d.shape[1]:
        raise TensorError(f"{path}: {name}/d has shape {array.shape}; needs ({len(a)}, side of a tile) or ({len(a)},)")
    questions = Probes(case, a, b, c, probes[f"{name}/question"], probes[f"{name}/note"])
    return questions, decoded(d, case.out.name)
