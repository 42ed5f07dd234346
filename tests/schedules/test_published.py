"""Published kernels: each in a file of its own, a user's like a packaged one, and known by name nowhere else."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim.config.bands import kind_of
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling, tiling_fields
from npusim.errors import NpusimError, TilingError
from npusim.library import SCHEDULES, find_schedule
from npusim.machines.published_kernel import AscendKernel, GpuKernel, PublishedKernel
from npusim.machines.published_kernels import find_kernel, kernels
from npusim.report.result_json import record_of
from npusim.report.run_inputs import tiling_text
from npusim.simulation.request import Request
from npusim.studies.explore.space import SearchRequest, parse_field
from npusim.studies.validate.measured_times import validate_times
from tests.parsed import nodes_of_kind, tree_of

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE = Path(npusim.__file__).parent
ROOM, ROOM_MODULE = PACKAGE / "library" / "published", "npusim.library.published"
#: A kernel of tiles as FlashAttention-2 has them for heads of 64, which looks 30 things up before each of its blocks.
MINE = """
from npusim.kernel import Charge, GpuKernel, layout

LOOKUPS = Charge("WARPS.sharing.lookup_cycles", 30, "block")
MINE = GpuKernel(
    name="mine",
    whose="the file's",
    tiles={2: {64: layout(128, 128, warps=4)}},
    fields=lambda device: {"stages": None},
    needs=lambda device: "" if device.name == "h200" else f"is for h200, not for {device.name}",
    charges=lambda use: (LOOKUPS,),
)
"""
KEY = "cores.sm.engines.WARPS.sharing.lookup_cycles"


ATTENTION = {"batch": 1, "heads": 9, "kv_heads": 3, "head_dim": 64, "causal": True, "dtype": "float16"}


def run_of(kernel: str, seq: int = 512, **more: Any) -> npusim.RunResult:
    problem = Problem(**ATTENTION, seq_q=seq, seq_kv=seq)  # type: ignore[arg-type]
    call: dict[str, Any] = {"hw": "h200", "problem": problem, "numerics": False, "trace_groups": ()}
    return npusim.run("flash", tiling={"kernel": kernel}, **call, **more)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """Return how ``kernel=`` names a kernel in a file."""
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return f"{tmp_path / 'mine.py'}:MINE"


def measured(mine: str, path: Path, lookup: int) -> Path:
    """Write times of a kernel on a device with another constant as measurements."""
    lines = ["schema: npusim.measurements/1", 'source: "written by a test"', "cases:"]
    for seq in range(128, 1408, 128):
        time, sizes = run_of(mine, seq, overrides={KEY: str(lookup)}).latency_us, {"seq_q": seq, "seq_kv": seq}
        workload, how = json.dumps({**ATTENTION, **sizes}), json.dumps({"kernel": mine})
        lines.append(
            f"  - {{name: s{seq}, device: h200, schedule: flash, tiling: {how}, workload: {workload}, "
            f"measured: {{latency_us: {time}}}}}"
        )
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_kernel_and_its_charge_are_one_file(mine: str) -> None:
    plain, charged = run_of("fa2"), run_of(mine)
    assert charged.timing is not None
    assert plain.timing is not None
    assert max(block.rows for block in charged.program.phases[0].blocks) == 128
    constant = dict(load_device("h200").quantities())[KEY].value
    blocks = sum(len(phase.blocks) for phase in charged.program.phases)
    assert KEY not in plain.timing.term_cycles
    assert charged.timing.term_cycles[KEY] == 30 * constant * blocks
    assert charged.cycles > plain.cycles


def test_its_charge_moves_a_run_as_every_constant_does(mine: str) -> None:
    assert run_of(mine, overrides={KEY: "4000"}).cycles > run_of(mine).cycles
    assert run_of("fa2", overrides={KEY: "4000"}).cycles == run_of("fa2").cycles


def test_its_measurements_are_the_second_place(mine: str, tmp_path: Path) -> None:
    """They are validated as those of a packaged kernel, and its charge's constant is fitted to them."""
    file = measured(mine, tmp_path / "measured.yaml", 400)
    assert all(r.relative_error < 0 for r in validate_times(file).residuals)
    pytest.importorskip("scipy", reason="npusim[calibrate]")
    from npusim.studies.validate.calibrate import calibrate

    (fitted,) = calibrate(file, constants=(KEY,)).constants
    assert fitted.key == KEY
    assert fitted.after == pytest.approx(400, rel=0.02)
    assert kind_of(build_tiling(find_schedule("flash", "nvidia").tiling, {"kernel": mine})) == mine


@pytest.mark.parametrize(
    ("change", "hw", "fields", "message"),
    [
        ((), "a10", {}, r"kernel: .*mine\.py:MINE is for h200, not for a10"),
        (
            (),
            "h200",
            {"block_q": 64},
            r"block_q: 64; kernel=.*mine\.py:MINE has tiles of 128 x 128 with 4 warps, and the",
        ),
        (
            ("{2: {64", "{2: {32"),
            "h200",
            {},
            r"kernel: .*mine\.py:MINE has no layout for head_dim 64 in float16; the largest is 32",
        ),
        (("sharing.lookup_cycles", "sharing.look"), "h200", {}, r"cores\.sm\.engines\.WARPS\.sharing\.look: missing"),
        (
            ('30, "block"', '30, "end"'),
            "h200",
            {},
            r"the charge WARPS\.sharing\.lookup_cycles for each end; allowed: block,",
        ),
        (('30, "block"', '30, "score"'), "h200", {}, "for each score; .* one of an engine's ops, such as ALU.ops.comp"),
        (
            ('30, "block"', '-30, "block"'),
            "h200",
            {},
            r"mine\.py:MINE has the charge .*-30.*; charges= must return Charges whose times is 0 or more",
        ),
        (
            ("use: (LOOKUPS,)", "use: LOOKUPS"),
            "h200",
            {},
            r"the charge 'WARPS\.sharing\.lookup_cycles'; charges= must return Charges",
        ),
        (("MINE = GpuK", "OURS = GpuK"), "h200", {}, "MINE is not a GpuKernel; the file has OURS"),
        (("GpuKernel(", "GpuKernel(1/0, "), "h200", {}, r"mine\.py:5: ZeroDivisionError"),
        (("use: (LOOKUPS,)", "use: 1 / 0"), "h200", {}, r"mine\.py:11: kernel=.*mine\.py:MINE: charges: ZeroDivisionE"),
        (
            ("use: (LOOKUPS,)", "use: (1 / 0 for _ in (LOOKUPS,))"),
            "h200",
            {},
            r"mine\.py:11: kernel=.*: charges: ZeroDivisionError",
        ),
        (('{"stages": None}', "device.stages"), "h200", {}, r"mine\.py:9: kernel=.*: fields: AttributeError: .*stages"),
        (('{"stages": None}', "None"), "h200", {}, r"mine\.py:9: kernel=.*: fields: returns None, not a Mapping"),
        (
            ('{"stages"', '{"stagse"'),
            "h200",
            {},
            "kernel: .*mine.py:MINE decides stagse: unknown tiling field. Did you",
        ),
        (('{"stages": None}', '{"stages": "x"}'), "h200", {}, "MINE decides stages: expected a whole number, got 'x'"),
        (('"" if device.name', "0 if device.name"), "h200", {}, r"mine\.py:10: kernel=.*: needs: returns 0, not a str"),
        (("charges=", "order=lambda phase: phase.none, charges="), "h200", {}, r"mine\.py:11: .*: order: AttributeErr"),
        (
            ("layout(128, 128, warps=4)", "(1, 2, 3)"),
            "h200",
            {},
            "MINE has 2 for head_dim 64; a tile must be a result of layo",
        ),
    ],
)
def test_what_a_file_cannot_do_is_refused(
    change: tuple[str, str] | tuple[()], hw: str, fields: dict[str, int], message: str, tmp_path: Path
) -> None:
    text = MINE.replace(*change) if change else MINE
    assert not change or text != MINE
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises(NpusimError, match=message):
        npusim.run(
            "flash", hw=hw, problem=Problem(**ATTENTION, seq_q=64, seq_kv=64), numerics=False,
            tiling={"kernel": f"{tmp_path / 'mine.py'}:MINE", **fields},
        )  # fmt: skip


def test_every_packaged_kernel_computes_schedules_that_there_are() -> None:
    known = {name for name, _ in SCHEDULES}
    computed = {name: set(kernel.computes) for name, kernel in kernels(PublishedKernel).items()}
    assert all(computed.values())
    assert set().union(*computed.values()) <= known


@pytest.mark.parametrize(("name", "family"), SCHEDULES)
def test_a_schedule_takes_the_kernels_that_compute_it_and_no_others(name: str, family: str) -> None:
    """On its cores: a refusal lists what there is, and each listed one is taken."""
    schedule, taken = find_schedule(name, family), set()
    for kernel in kernels(PublishedKernel).values():
        try:
            schedule.tiled({"kernel": kernel.name})
            taken.add(kernel.name)
            assert name in kernel.computes
        except TilingError as error:
            assert re.search(rf"{kernel.name}.*([Tt]here are |cores has )", str(error))
    fields = {f.name: f.choices for f in tiling_fields(schedule.tiling)}
    assert set(fields.get("kernel", ())) == taken
    expected = {
        ("flash", "nvidia"): {"cudnn", "cudnn_sm120", "fa2", "fa3", "fa4_sm120", "flashinfer", "triton", "xformers"},
        ("flash", "cpu"): {"cudnn", "cudnn_sm120", "fa2", "fa3", "fa4_sm120", "flashinfer", "triton", "xformers"},
        ("split_kv", "nvidia"): {"fa2", "fa3"},
        ("flash_backward", "nvidia"): {"cudnn", "fa3"},
        ("volta_flash", "nvidia"): {"xformers"},
        ("flash", "ascend"): {"cann", "pto", "tilelang"},
        ("split_kv", "ascend"): {"cann", "pto", "tilelang"},
        ("two_level", "ascend"): {"cann"},
        ("gated_delta", "ascend"): {"pto_chunks"},
    }
    assert taken == expected.get((name, family), set())


@pytest.mark.parametrize("hw", ["h200", "v100", "a10", "ascend_910b2", "ascend_950"])
@pytest.mark.parametrize("name", ["retention", "gla", "ssd", "pasa", "fp8_attention", "gemm"])
@pytest.mark.parametrize("kernel", ["cudnn", "fa2", "fa3", "cann"])
def test_a_kernel_that_no_library_has_is_refused_by_every_verb(name: str, hw: str, kernel: str) -> None:
    """Before these ran, with the kernel's name and none of its decisions, or ended in a KeyError."""
    sizes: dict[str, Any] = {"problem": {"m": 64, "n": 64, "k": 64}} if name == "gemm" else {}
    asked: dict[str, Any] = {"hw": hw, "tiling": {"kernel": kernel}, **sizes}
    message = (
        rf"kernel={kernel}: {name} on (nvidia|ascend) cores has no published kernel; the "
        rf"published kernels are cann, cudnn, .*fa2"
    )
    with pytest.raises(TilingError, match=message):
        npusim.run(name, **asked, numerics=False)
    with pytest.raises(TilingError, match=message):
        npusim.explore(name, {"kernel": [kernel, "fa4"]}, hw=hw, **sizes)


@pytest.mark.parametrize(("kernel", "hw", "cores"), [("cann", "h200", "ascend"), ("fa3", "ascend_910b2", "nvidia")])
def test_a_kernel_of_another_family_is_refused_with_the_cores_that_have_it(kernel: str, hw: str, cores: str) -> None:
    message = rf"kernel={kernel}: a kernel of {cores} cores for flash, split_kv.*; flash on \w+ cores has \w+, "
    with pytest.raises(TilingError, match=message):
        npusim.run("flash", hw=hw, seq=128, tiling={"kernel": kernel}, numerics=False)
    with pytest.raises(TilingError, match=message):
        npusim.explore("flash", {"kernel": [kernel]}, hw=hw, seq=128)


def test_a_search_takes_one_beside_packaged_ones(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(mine).parent)
    name, values = parse_field("kernel=fa2,fa3,mine.py:MINE")
    problem = Problem(**ATTENTION, seq_q=512, seq_kv=512)  # type: ignore[arg-type]
    found = npusim.explore("flash", {name: values}, hw="h200", problem=problem, exhaustive=True).outcomes
    times = {str(dict(o.point)["kernel"]): o.cycles for o in found}
    assert times == {kernel: run_of(kernel).cycles for kernel in ("fa2", "fa3", "mine.py:MINE")}


@pytest.mark.parametrize("kernel", ["cudnn", "fa2", "fa3", "mine"])
@pytest.mark.parametrize("queries", [64, 512])
def test_a_printed_tile_runs_again(kernel: str, queries: int, mine: str) -> None:
    """Fields that a kernel decides and nobody may name are not printed; those of its tile are, as the call has them."""
    problem = Problem(**ATTENTION | {"causal": False}, seq_q=queries, seq_kv=512)  # type: ignore[arg-type]
    call: dict[str, Any] = {"hw": "h200", "problem": problem, "numerics": False, "trace_groups": ()}
    first = npusim.run("flash", tiling={"kernel": mine if kernel == "mine" else kernel}, **call)
    shown = record_of(first).tiling
    assert {"block_q", "block_kv", "kernel"} <= shown.keys() < type(first.tiling).model_fields.keys()
    assert max(block.rows for block in first.program.phases[0].blocks) in (queries, shown["block_q"])
    again = npusim.run("flash", tiling=dict(pair.split("=") for pair in tiling_text(shown).split()), **call)
    assert (again.cycles, record_of(again).tiling) == (first.cycles, shown)


@pytest.mark.parametrize(
    ("kernels", "left"),
    [
        ("cudnn", {"kernel": 1}),
        ("mine", {"kernel": 1}),
        ("fa2", {"launch": 2}),
        ("fa3", {"block_q": 9, "block_kv": 9}),
        ("cudnn,mine", {"kernel": 2}),
        ("cudnn,fa3", {"kernel": 2, "block_q": 8, "block_kv": 9}),
    ],
)
def test_a_search_leaves_out_what_the_kernel_decides(kernels: str, left: dict[str, int], mine: str) -> None:
    problem = Problem(**ATTENTION, seq_q=512, seq_kv=512)  # type: ignore[arg-type]
    one, _, other = kernels.replace("mine", mine).partition(",")
    request = Request("flash", hw="h200", problem=problem, tiling=None if other else {"kernel": one})
    axes, _ = SearchRequest(request, ("flash",)).auto_space({"kernel": (one, other)} if other else {})
    assert {n: len(values) for n, values in axes.items()} == left


def test_a_search_of_a_kernel_that_decides_all_has_its_one_point(mine: str) -> None:
    problem = Problem(**ATTENTION, seq_q=512, seq_kv=512)  # type: ignore[arg-type]
    found = npusim.explore("flash", auto=True, hw="h200", problem=problem, tiling={"kernel": mine})
    assert [o.cycles for o in found.outcomes] == [run_of(mine).cycles]


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({"causal": False}, (128, 32)),
        ({}, (64, 64)),
        ({"window": 256}, (128, 32)),
        ({"window": 512}, (64, 64)),
        ({"seq_q": 1}, (128, 32)),
    ],
)
def test_flash_attention_2_takes_its_causal_tile_where_nothing_else_masks(
    change: dict[str, Any], tile: tuple[int, int]
) -> None:
    """On sm_86: run_mha_fwd_hdim128 by params.is_causal, which a window or a single query unsets (flash_api.cpp)."""
    problem = Problem(**ATTENTION | {"head_dim": 128, "seq_q": 512, "seq_kv": 512} | change)  # type: ignore[arg-type]
    assert kernels(GpuKernel)["fa2"].tile(problem, load_device("a10"))[:2] == tile


@pytest.mark.parametrize(("head_dim", "keys"), [(64, 256), (128, 128), (256, 64)])
def test_flash_attention_2_with_pages_runs_the_kernel_of_split_keys(head_dim: int, keys: int) -> None:
    """mha_varlen_fwd forces it where there is a block table (flash_api.cpp, force_split_kernel), on every chip."""
    for hw in ("a100", "l40s", "h200"):
        sizes: dict[str, Any] = ATTENTION | {"heads": 63, "head_dim": head_dim, "seq_q": 1024, "seq_kv": 1024}
        options: dict[str, Any] = {"hw": hw, "numerics": False, "trace_groups": ()}
        dense = npusim.run("flash", problem=Problem(**sizes), tiling={"kernel": "fa2"}, **options)
        paged = npusim.run("flash", problem=Problem(**sizes, page=16), tiling={"kernel": "fa2"}, **options)
        assert [getattr(paged.tiling, n) for n in ("block_q", "block_kv", "warps")] == [64, keys, 4]
        assert len(paged.program.phases) == 1  # no keys are split, and there is no merge
        of_dense = [getattr(dense.tiling, n) for n in ("block_q", "block_kv", "warps")]
        assert (paged.cycles == dense.cycles) == (of_dense == [64, keys, 4])
        with pytest.raises(TilingError, match=rf"block_q: 128; kernel=fa2 has tiles of 64 x {keys} with 4 warps"):
            tiling = {"kernel": "fa2", "block_q": 128}
            npusim.run("flash", problem=Problem(**sizes, page=16), tiling=tiling, **options)


@pytest.mark.parametrize(
    ("hw", "tile"), [("a10", (64, 64, 4)), ("l40s", (64, 64, 4)), ("a100", (128, 64, 8)), ("h200", (64, 64, 4))]
)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_2_chooses_the_tile_of_heads_of_256_by_shared_memory(
    hw: str, tile: tuple[int, int, int], causal: bool
) -> None:
    """run_mha_fwd_hdim256: 128 rows where a block has 128 KB and a multiprocessor no room for two blocks of 64 rows."""
    sizes: dict[str, Any] = ATTENTION | {"heads": 63, "head_dim": 256, "seq_q": 512, "seq_kv": 512, "causal": causal}
    took = npusim.run("flash", hw=hw, problem=Problem(**sizes), tiling={"kernel": "fa2"}, numerics=False)
    assert tuple(getattr(took.tiling, n) for n in ("block_q", "block_kv", "warps")) == tile


def test_one_of_an_ascend_devices_is_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(
        "from npusim.kernel import AscendDecisions, AscendKernel\n"
        'DECIDES = AscendDecisions(barriers="needed", together=2)\n'
        'OURS = AscendKernel(name="ours", whose="the file\'s", decides=DECIDES)\n',
        encoding="utf-8",
    )
    call: dict[str, Any] = {"hw": "ascend_910b2", "workload": "llama2_7b", "seq": 1024, "numerics": False}
    name = f"{tmp_path / 'ours.py'}:OURS"
    ours, same = (
        npusim.run("flash", tiling=tiling, **call)
        for tiling in ({"kernel": name}, {"kernel": "tilelang", "barriers": "needed"})
    )
    assert f"kernel={name}: the file's" in ours.notes
    assert ours.cycles == same.cycles


@pytest.mark.parametrize(
    ("schedule", "of", "wanted"), [("flash", "recurrence", "attention"), ("gated_delta", "attention", "recurrence")]
)
def test_a_kernel_of_another_computation_is_refused(schedule: str, of: str, wanted: str, tmp_path: Path) -> None:
    text = (
        f"from npusim.kernel import *\nOURS = AscendKernel(name='o', whose='o', of='{of}', decides=AscendDecisions())\n"
    )
    (tmp_path / "ours.py").write_text(text, encoding="utf-8")
    with pytest.raises(NpusimError, match=rf"ours\.py:OURS is a kernel of {of}; needed here: a kernel of {wanted}"):
        npusim.run(schedule, hw="ascend_910b2", tiling={"kernel": f"{tmp_path / 'ours.py'}:OURS"}, numerics=False)


def test_a_kernel_s_order_holds_until_a_tiling_names_another(tmp_path: Path) -> None:
    decides = "AscendDecisions(order='serial', slots=1, route='gm')"
    text = f"OURS = AscendKernel(name='o', whose='o', deal='balanced', decides={decides})\n"
    (tmp_path / "ours.py").write_text(f"from npusim.kernel import *\n{text}", encoding="utf-8")
    problem = Problem(**ATTENTION, seq_q=512, seq_kv=512)  # type: ignore[arg-type]
    named: dict[str, object] = {"order": "serial", "slots": 1, "route": "gm"}
    ours = {"kernel": f"{tmp_path / 'ours.py'}:OURS"}
    kernel, same, changed, usual = (
        npusim.run("flash", hw="ascend_910b2", problem=problem, tiling=tiling, numerics=False, trace_groups=())
        for tiling in (ours, {"kernel": "cann", **named}, {**ours, "order": "rolling", "slots": 2}, {"kernel": "cann"})
    )
    assert kernel.cycles == same.cycles > changed.cycles == usual.cycles
    assert [(r.tiling.order, r.tiling.slots) for r in (kernel, changed)] == [("serial", 1), ("rolling", 2)]


def test_what_is_kept_of_a_call_forgets_a_file_that_has_changed(tmp_path: Path) -> None:
    file, cycles = tmp_path / "ours.py", []
    for deal in ("round_robin", "balanced"):
        text = f'OURS = AscendKernel(name="ours", whose="ours", decides=AscendDecisions(), deal="{deal}")\n'
        file.write_text(f"from npusim.kernel import AscendDecisions, AscendKernel\n{text}", encoding="utf-8")
        call = f"import npusim; print(npusim.run('flash', hw='ascend_910b2', tiling={{'kernel': '{file}:OURS'}}, "
        code = f"{call}workload='llama2_7b', seq=2048, trace_groups=(), numerics=False).tiling.deal)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        cycles.append(done.stdout.strip())
    assert cycles == ["round_robin", "balanced"]


# ---------------------------------------------------------------- names outside the room

#: Who may name a published kernel, and why.
NAMED: dict[str, frozenset[str]] = {
    "cli/__init__.py": frozenset({"triton"}),  # the library, which is not frozen where it is imported
    "kernels/triton/releases.py": frozenset({"triton"}),  # the same
    "kernels/tilelang/program.py": frozenset({"tilelang"}),  # the library, in whose place a stand-in is
    "kernels/tilelang/recording.py": frozenset({"tilelang"}),  # the library
    "__init__.py": frozenset({"triton"}),  # the public function of that name
    "config/bands.py": frozenset({"triton"}),  # the family of bands of recorded launches
    "kernels/triton/calls.py": frozenset({"triton"}),  # the library, as in the next three
    "kernels/triton/recording.py": frozenset({"triton", "tilelang"}),
    "kernels/triton/compiler.py": frozenset({"triton"}),
    "kernels/attention/split_rules.py": frozenset({"fa3", "fa4", "flashinfer"}),  # rules by their names
    "library/split_kv.py": frozenset({"fa2", "fa3", "fa4", "cann", "flashinfer"}),  # the same, as ``splits`` takes them
    "library/fa4.py": frozenset({"fa4"}),  # a schedule of that name
    "library/two_level.py": frozenset({"cann"}),  # the kernel of FastAttention's baseline
    "library/fp8_attention.py": frozenset({"fa3", "flashinfer"}),  # a preset of precisions of that name
    "machines/ascend/__init__.py": frozenset({"cann"}),  # the family's usual kernel
    "machines/sm/__init__.py": frozenset({"fa2"}),  # the same
    "kernels/declare/presets.py": frozenset({"pto", "tilelang"}),  # presets that are those kernels' formats
    "cli/program_command.py": frozenset({"tilelang"}),  # a language in which a program is written out
    "simulation/written_program.py": frozenset({"tilelang"}),  # the same, in the command that a text names
    "machines/ascend/text_buffers.py": frozenset({"tilelang"}),  # a name that such a text has already
}


def test_the_names_of_published_kernels_stay_in_their_room() -> None:
    known = kernels(PublishedKernel).keys()
    files = {p.stem for p in ROOM.glob("*.py")} - {"__init__"}
    assert files >= known
    named, imported = dict[str, frozenset[str]](), dict[str, frozenset[str]]()
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(ROOM):
            continue
        tree, name = tree_of(path), path.relative_to(PACKAGE).as_posix()
        texts = {n.value for n in nodes_of_kind(tree, ast.Constant) if isinstance(n.value, str)}
        froms = [n for n in nodes_of_kind(tree, ast.ImportFrom) if (n.module or "").startswith(ROOM_MODULE)]
        modules = {part for n in froms for part in (n.module or "").split(".")}
        modules |= {alias.name for n in froms for alias in n.names}
        named |= {name: frozenset(texts & known)} if texts & known else {}
        imported |= {name: frozenset(modules & files)} if modules & files else {}
    assert named == NAMED
    assert not imported  # a family's usual kernel is named by its manifest


def test_each_file_has_one_kernel_of_its_name_which_the_command_line_offers() -> None:
    hopper = {"fa2", "fa3", "cudnn", "flashinfer", "xformers", "triton"}
    assert hopper | {"cudnn_sm120", "fa4_sm120"} == kernels(GpuKernel).keys()
    assert {"cann", "pto", "pto_chunks", "tilelang"} == kernels(AscendKernel).keys()
    offered: dict[str, Mapping[str, PublishedKernel]] = {
        "nvidia": kernels(GpuKernel, "flash"),
        "ascend": kernels(AscendKernel, "flash"),
    }
    for family, listed in offered.items():
        (field,) = (f for f in tiling_fields(find_schedule("flash", family).tiling) if f.name == "kernel")
        assert set(field.choices) == listed.keys()
        assert all(find_kernel(PublishedKernel, str(name)) is listed[str(name)] for name in field.choices)
