"""Profiles as measurements: every launch in a case or counted, in the units and names of each profiler."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import npusim
from npusim.config.cases import MeasurementCase, load_measurements
from npusim.errors import SpecError
from npusim.report.pipes import pipes_csv
from npusim.report.result_json import record_of
from npusim.studies.validate import validate
from npusim.studies.validate.profiles import PROFILERS, ImportedProfile, import_profile, listed

SAMPLES = Path(__file__).parent / "profiles"
HEAD = 'schema: npusim.mapping/1\nsource: "a test"\nhw: {hw}\nl2: clean\nkernels:\n'
RULES = HEAD.format(hw="ascend_910b2") + (
    "- {kernel: MatMulV2, schedule: gemm, inputs: [m k, k n]}\n"
    "- {kernel: matmul_custom, schedule: gemm, workload: {m: 128, n: 256, k: 512}}\n"
    "- {kernel: FlashAttention, schedule: flash, l2: warm, inputs: [batch heads seq_q head_dim, _ kv_heads seq_kv _]}\n"
)
GPU = HEAD.format(hw="h200") + (
    "- kernel: 'flash_fwd_d(?P<head_dim>\\d+)_q(?P<block_q>\\d+)_k(?P<block_kv>\\d+)'\n"
    "  schedule: flash\n  grid: _ heads batch\n  workload: {seq_q: 4096, seq_kv: 4096}\n"
)


def brought(tmp_path: Path, kind: str, path: Path, rules: str) -> tuple[ImportedProfile, dict[str, MeasurementCase]]:
    mapping, out = tmp_path / "mapping.yaml", tmp_path / "measured.yaml"
    mapping.write_text(rules)
    profile = import_profile(kind, path, mapping)
    out.write_text(profile.text)
    return profile, {case.schedule: case for case in load_measurements(out).cases}


def test_every_launch_of_msprof_is_in_a_case_or_counted(tmp_path: Path) -> None:
    profile, cases = brought(tmp_path, "msprof", SAMPLES / "prof", RULES)
    assert (profile.cases, profile.mapped, listed(profile.unmapped)) == (2, 3, "1 launch of aclnnAdd_Add (6.02 us)")
    product, attention = cases["gemm"], cases["flash"]
    assert (product.launches, product.kind, product.start) == (2, "kernel", "clean")
    assert product.spread == pytest.approx(25.1 / 24.8 - 1, abs=1e-4)
    assert {name: value.low for name, value in product.measured.items()} == pytest.approx(
        {"latency_us": 24.8, "core_us": 21.4, "mac_us": 18.1, "mte1_us": 9.0, "mte2_us": 15.5, "fixp_us": 2.2}
    )
    sizes = {"batch": 1, "heads": 8, "kv_heads": 2, "seq_q": 1024, "seq_kv": 1024, "head_dim": 128, "dtype": "bfloat16"}
    assert attention.workload.model_dump(exclude_none=True) == sizes
    assert (attention.start, attention.measured.vec_us) == ("warm", (61.0, 61.0))
    assert len(validate(tmp_path / "measured.yaml", jobs=2).residuals) == 6 + 7


@pytest.mark.parametrize(("kind", "blocks"), [("msprof", "Block Dim"), ("msprof", "Block Num"), ("torch", "Block Num")])
def test_tables_of_torch_npu_are_read(tmp_path: Path, kind: str, blocks: str) -> None:
    """``kernel_details.csv``: CANN documentation, "kernel_details"; columns of AI Core metrics as in op_summary."""
    folder = tmp_path / "ASCEND_PROFILER_OUTPUT"
    folder.mkdir()
    (folder / "kernel_details.csv").write_text(
        f"Step Id,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),{blocks},Mix {blocks},"
        "Input Shapes,Input Data Types,Input Formats,aicore_time(us),aic_mac_time(us)\n"
        '7,aclnnMatmul_MatMulV2,MatMulV2,AI_CORE,1000.5,24.5,0,24,0,"""1024,2048;2048,512""",FLOAT16;FLOAT16,ND;ND,'
        "21.2,18.1\n"
    )
    launch = next(iter(PROFILERS[kind](tmp_path)))
    assert launch.grid == (24,)
    assert launch.inputs == ((1024, 2048), (2048, 512))
    case = brought(tmp_path, kind, tmp_path, RULES)[1]["gemm"]
    measured = {"latency_us": (24.5, 24.5), "core_us": (21.2, 21.2), "mac_us": (18.1, 18.1)}
    assert dict(case.measured.items()) == measured


def test_shapes_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "op_summary.csv").write_text('Op Name,OP Type,Task Duration(us),Input Shapes\nMatMulV2,y,3,"12,x"\n')
    with pytest.raises(SpecError, match="row 1: Input Shapes: '12,x' is not a list of sizes"):
        list(PROFILERS["msprof"](tmp_path))


@pytest.mark.parametrize(
    ("unit", "durations", "us"),
    [
        ("nsecond", ("151.360", "2.151.360"), 151.36),  # points of thousands by the second number
        ("nsecond", ("151,360", "2,151,360"), 151.36),
        ("usecond", ("151.360", "5.12"), 151.36),  # points of fractions
        ("usecond", ("151,360", "5,12"), 151.36),
        ("usecond", ("1.151,36", "7"), 1151.36),
        ("usecond", ("1151.360", "7"), 1151.36),
        ("nsecond", ("151360", "7"), 151.36),
    ],
)
def test_numbers_of_other_locales_are_decided_by_the_others(
    tmp_path: Path, unit: str, durations: tuple[str, ...], us: float
) -> None:
    file, (first, second) = tmp_path / "ncu.csv", durations
    columns = '"ID","Kernel Name","CC","gpu__time_duration.sum"\n"","","","' + unit
    file.write_text(f'{columns}"\n"0","x","9.0","{first}"\n"1","y","9.0","{second}"\n')
    assert next(iter(PROFILERS["ncu"](file))).measured["latency_us"] == pytest.approx(us)


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        (
            ("151.360",),
            "'151.360' nsecond: does the separator mark thousands or a fraction. export it again with LC_ALL=C",
        ),
        (("1,360", "700"), "'1,360' nsecond: does the separator mark thousands or a fraction?"),
        (("5,12", "7.5"), "fractions have points and others commas"),
    ],
)
def test_a_number_that_may_be_either_is_refused(tmp_path: Path, durations: tuple[str, ...], message: str) -> None:
    file = tmp_path / "ncu.csv"
    rows = "".join(f'"{n}","x","9.0","{text}"\n' for n, text in enumerate(durations))
    file.write_text(f'"ID","Kernel Name","CC","gpu__time_duration.sum"\n"","","","nsecond"\n{rows}')
    with pytest.raises(SpecError, match=message):
        list(PROFILERS["ncu"](file))


def test_pipes_of_one_kernel_are_those_of_its_busiest_core(tmp_path: Path) -> None:
    measured = brought(tmp_path, "msopprof", SAMPLES / "opprof", RULES)[1]["gemm"].measured
    assert [measured.latency_us, measured.core_us, measured.mac_us, measured.mte2_us] == [
        (x, x) for x in (18.4, 14.0, 6.2, 9.3)
    ]


def test_pipes_of_a_run_have_the_profilers_names(tmp_path: Path) -> None:
    """A run's ``pipes.csv`` in place of a measured one: each pipe comes back as it was predicted."""
    run = npusim.run("flash", seq=512, numerics=False)
    (tmp_path / "PipeUtilization.csv").write_text(pipes_csv(record_of(run)))
    info = (SAMPLES / "opprof" / "OpBasicInfo.csv").read_text()
    (tmp_path / "OpBasicInfo.csv").write_text(info)
    (launch,) = PROFILERS["msopprof"](tmp_path)
    cycles = {use.queue: 0 for uses in run.timing.queues for use in uses}
    for uses in run.timing.queues:
        for use in uses:
            cycles[use.queue] = max(cycles[use.queue], use.busy_cycles)
    clock = run.device.clock_hz.value / 1e6
    for name, queue in (("mac_us", "aic.CUBE"), ("mte2_us", "aic.MTE2"), ("vec_us", "aiv0.VECTOR")):
        assert launch.measured[name] == pytest.approx(cycles[queue] / clock, rel=1e-3), name


@pytest.mark.parametrize(
    ("kind", "file"), [("ncu", "ncu_raw.csv"), ("ncu", "ncu_details.csv"), ("torch", "kineto.json")]
)
def test_launches_of_a_gpu_have_microseconds_grid_and_captured_fields(tmp_path: Path, kind: str, file: str) -> None:
    profile, cases = brought(tmp_path, kind, SAMPLES / file, GPU)
    assert [launch.names for launch in profile.unmapped] == [("elementwise_kernel",)]
    case = cases["flash"]
    assert case.measured.latency_us == (1234.5, 1234.5)
    assert case.tiling == {"block_q": 128, "block_kv": 64}
    workload = case.workload
    assert (workload.batch, workload.heads, workload.head_dim) == (2, 16, 64)
    assert workload.dtype == ("float16" if kind == "torch" else None)


@pytest.mark.parametrize(
    ("kind", "text", "rules", "message"),
    [
        ("msprof", "", RULES, "no column Op Name, OP Type, Task Duration.us.; it is empty"),
        ("msprof", "a,b\n1,2\n", RULES, "columns are a, b"),
        (
            "msprof",
            "Op Name,OP Type,Task Duration(us)\nx,y,soon\n",
            RULES,
            "row 1: Task Dur.*: 'soon' is not a number of",
        ),
        ("msprof", "Op Name,OP Type,Task Duration(us)\nx,y,-3\n", RULES, "'-3' is not a number of at least 0"),
        (
            "torch",
            '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "dur": NaN}]}',
            GPU,
            "k: dur: 'nan' is not",
        ),
        (
            "msprof",
            "Op Name,OP Type,Task Duration(us)\nx,y,3\n",
            RULES,
            "no rule matches any of its 1 launch of x .3 us",
        ),
        ("msprof", "Op Name,OP Type,Task Duration(us)\nMatMulV2,y,3\n", RULES, "inputs.0: m k: 2 axes"),
        (
            "ncu",
            "ID,Kernel Name,gpu__time_duration.sum\n,,cycles\n0,x,5\n",
            GPU,
            "in 'cycles', which is not a unit of time",
        ),
        ("ncu", "ID,Kernel Name\n0,x\n", GPU, "no metric gpu__time_duration.sum"),
        ("torch", "{", GPU, "cannot be read as JSON"),
        ("torch", "{}", GPU, "no traceEvents"),
        ("torch", '{"traceEvents": []}', GPU, "no launch"),
        ("ncu", "", RULES.replace("MatMulV2", "("), "kernels.0.kernel: not a regular expression"),
    ],
)
def test_what_is_no_profile_says_so(tmp_path: Path, kind: str, text: str, rules: str, message: str) -> None:
    source, mapping = tmp_path / "file", tmp_path / "mapping.yaml"
    source.write_text(text or ("ID,Kernel Name,Duration\n,,us\n0,x,1\n" if kind == "ncu" else ""))
    mapping.write_text(rules)
    with pytest.raises(SpecError, match=message):
        import_profile(kind, source, mapping)


def test_an_expression_that_would_run_for_ever_is_refused(tmp_path: Path) -> None:
    """The message comes after some seconds of processor time, and the timer is off behind it."""
    rules = GPU.replace("kernel: '", "kernel: '(a+)+$|")
    launch = {"ph": "X", "cat": "kernel", "name": "a" * 60 + "b", "ts": 0, "dur": 5.0, "args": {"grid": [1, 1, 1]}}
    source, mapping = tmp_path / "trace.json", tmp_path / "mapping.yaml"
    source.write_text(json.dumps({"traceEvents": [launch]}))
    mapping.write_text(rules)
    begun = time.process_time()
    with pytest.raises(SpecError, match=r"mapping.yaml: kernels.0.kernel: \(a\+\)\+\$.* needs more than 2 s on 'aaa"):
        import_profile("torch", source, mapping)
    assert time.process_time() - begun < 6
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_rule_that_contradicts_the_shapes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"workload\.m: 7, but .*MatMulV2 was launched with 1024"):
        brought(tmp_path, "msprof", SAMPLES / "prof", RULES.replace("[m k, k n]}", "[m k, k n], workload: {m: 7}}"))


def test_devices_beside_the_file_and_one_line_a_reason(tmp_path: Path) -> None:
    case = "- {name: %s, hw: %s, schedule: %s, workload: {m: 64, n: 64, k: 64}, measured: {latency_us: 9}}\n"
    listed = [("one", "mine", "gemm"), *((f"bad{n}", "mine", "nothing") for n in range(6))]
    file = tmp_path / "measured.yaml"
    file.write_text('schema: npusim.measurements/1\nsource: "x"\ncases:\n' + "".join(case % row for row in listed))
    (tmp_path / "mine.yaml").write_text(
        "schema: npusim.device/1\nextends: ascend_910b2\nname: mine\ndescription: mine\n"
    )
    calls = SimpleNamespace(last=None)
    report = validate(file, progress=lambda done, total: setattr(calls, "last", (done, total)))
    assert [r.name for r in report.residuals] == ["one"]
    assert (calls.last, report.not_predicted, len(report.faults)) == ((7, 7), 6, 1)
    assert re.match("cases bad0, bad1, bad2, bad3 and 2 more: .*nothing.*; exclude them", report.faults[0])
