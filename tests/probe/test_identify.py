"""What is identified of units: registered ones, ones that no registry has, recorded ones, and faulty outputs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npusim.formats import ARITHMETICS, get_arithmetic
from npusim.formats.mma_tree import AdditionTree, C, compute, parse_tree, round_to
from npusim.studies.probe import trees
from npusim.studies.probe.decide import Identified, by_registry, goes_on, identify_product, predicted, same
from npusim.studies.probe.questions import LONG_K, RANDOM, ProbeCase, Probes, _Builder, _random, case_name, probes_of
from npusim.studies.probe.surviving_units import survivors
from npusim.studies.validate.vectors import load_vectors
from tests.probe.units import K, draw_unit, scalar_product

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
#: Seeds of units that nothing here was made on.
SEED = 31_000
FRESH = 2_000


def distinct() -> list[str]:
    """Registered arithmetics without scales, one of each that compute the same."""
    found: dict[Any, str] = {}
    for name, u in ARITHMETICS.items():
        if not u.scale_block and u.acc.bits <= 32:
            depth = u.k if u.index_groups or u.c_mode == "late" else 0
            block = 0 if u.method == "sequential" else u.block
            alike = replace(u, name="", k=depth, block=block, evidence="assumed", source="")
            found.setdefault(alike, name)
    return list(found.values())


@cache
def probes(key: str) -> Probes:
    return probes_of(ProbeCase.of(key))


@cache
def fresh(key: str) -> Probes:
    """Random rows that decide nothing."""
    p, rng = _Builder(ProbeCase.of(key)), np.random.default_rng(SEED)
    for kind in RANDOM:
        _random(p, kind, FRESH // len(RANDOM), rng)
    return p.finished()


def tiles(p: Probes, compute_rows: Any, side: int = 16) -> Any:
    """Whole tiles, as a chip returns them: each row with every column of its tile."""
    rows = np.repeat(np.arange(len(p.a)), side)
    columns = rows // side * side + np.tile(np.arange(side), len(p.a))
    return compute_rows(p.a[rows], p.b[columns], p.c[rows]).reshape(-1, side)


def of_name(name: str, case: ProbeCase, p: Probes) -> Any:
    """What a name computes of rows, by its own kernel or the slow path, as it leaves the chip."""
    u = get_arithmetic(name)
    if u.tree is None:
        d = by_registry(name, case, p.a, p.b, p.c)[:, 0]
    else:
        unit = replace(u.tree, tree=trees.repeated(u.tree.tree, p.a.shape[1]))
        d = compute(unit, (u.a, u.b, u.acc), p.a, p.b, p.c)
    return d


def assert_registered(name: str) -> None:
    u = get_arithmetic(name)
    key = case_name(u.a_format, u.b_format, u.acc_format)
    case, p = ProbeCase.of(key), probes(key)
    assert len(p.a) + len(probes_of(ProbeCase(key, LONG_K)).a) <= 6_000
    one = identify_product(p, by_registry(name, case, p.a, p.b, p.c, 16))
    assert name in one.registered
    assert one.explained == one.asked
    assert one.unit is not None
    step = trees.repeated(one.unit.tree, K)  # what was read off the outputs, not the registered row
    read = predicted(replace(one.unit, tree=step), case, (fresh(key).a, fresh(key).b, fresh(key).c), one.acc, one.out)
    assert same(read, of_name(name, case, fresh(key))).all()


@pytest.mark.parametrize("name", ["volta.mma.k4.f16.f32", "hopper.wgmma.k32.e4m3.f32", "ascend.cube.k16.bf16.f32"])
def test_a_registered_arithmetic_is_read_off_its_outputs(name: str) -> None:
    assert_registered(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", distinct())
def test_every_registered_arithmetic_is_read_off_its_outputs(name: str) -> None:
    assert_registered(name)


def drawn(key: str, seed: int) -> tuple[str, Identified, bool]:
    """A drawn unit's words, what was identified, and whether its name computes all fresh outputs alike."""
    case, p = ProbeCase.of(key), probes(key)
    words, unit = draw_unit(np.random.default_rng(seed), case.formats[2].name)

    def outputs(a: Any, b: Any, c: Any) -> Any:
        return predicted(unit, case, (a, b, c), case.formats[2], "nearest_even")

    one = identify_product(p, tiles(p, outputs))
    if one.name is None:
        return words, one, False
    hidden = compute(unit, case.formats, fresh(key).a, fresh(key).b, fresh(key).c)  # before it leaves the chip
    named = of_name(one.name, case, fresh(key))
    if not same(named, hidden).all():  # float16 results do not show all of a float32's rounding: that is said
        assert case.out.bits < 32, words
        assert any(a.open for a in one.answers if a.question.startswith("rounding"))
        named, hidden = (round_to(x, case.out, one.out) for x in (named, hidden))
    return words, one, bool(same(named, hidden).all())


def assert_drawn(key: str, count: int, at_least: int) -> None:
    results = [drawn(key, SEED + n) for n in range(count)]
    wrong = [words for words, one, is_equal in results if one.name is not None and not is_equal]
    assert not wrong
    said = [one.findings for _, one, _ in results if one.name is None]
    assert all("unexplained" in findings[-1] for findings in said)
    assert sum(is_equal for *_, is_equal in results) >= at_least


@pytest.mark.parametrize(
    ("fraction", "cut"), [pytest.param(33, "toward_zero", marks=pytest.mark.exhaustive), (18, "nearest_even")]
)
def test_a_step_of_two_products_that_aligns_is_identified_by_c(fraction: int, cut: str) -> None:
    """No third product is in its step: C is M there, -M and the small one are its products."""
    case, p = ProbeCase.of("f16.f32"), probes("f16.f32")
    unit = AdditionTree(trees.repeated((C, 0, 1), K), fraction, cut=cut, rounding="toward_zero")
    one = identify_product(p, tiles(p, lambda *given: predicted(unit, case, given, case.formats[2], "nearest_even")))
    assert one.explained == one.asked
    assert one.unit is not None
    assert (one.unit.fraction, one.unit.cut) == (fraction, cut)


@pytest.mark.parametrize(("instruction", "first"), [("wgmma", "hopper.wgmma"), ("", "hopper.mma")])
def test_of_equal_names_that_of_the_devices_own_instruction_comes_first(instruction: str, first: str) -> None:
    case, p = ProbeCase.of("f16.f32"), probes("f16.f32")
    outputs = by_registry("hopper.wgmma.k16.f16.f32", case, p.a, p.b, p.c, 16)
    one = identify_product(p, outputs, "hopper.mma.k16.f16.f32", instruction)
    assert one.name == f"{first}.k16.f16.f32"
    assert {"hopper.mma.k16.f16.f32", "hopper.wgmma.k16.f16.f32"} <= set(one.registered)


def test_units_that_no_registry_has_are_identified_whole_or_said_to_be_unexplained() -> None:
    assert_drawn("f16.f32", 1, 1)


@pytest.mark.exhaustive
def test_twenty_drawn_units() -> None:
    assert_drawn("f16.f32", 20, 18)


@pytest.mark.exhaustive
def test_ten_drawn_units_through_float16_results_without_c() -> None:
    assert_drawn("f16.f32.to_f16", 14, 10)


def test_a_registered_arithmetic_is_identified_through_float16_results_without_c() -> None:
    key = "f16.f32.to_f16"
    case, p = ProbeCase.of(key), probes(key)
    name = "ascend.cube.k16.f16.f32"
    with np.errstate(over="ignore"):
        d = by_registry(name, case, p.a, p.b, p.c, 16).astype(np.float16).astype(np.float64)
    one = identify_product(p, d, name)
    assert one.name == name


@pytest.mark.parametrize("row", [40, pytest.param(4_800, marks=pytest.mark.exhaustive)])
def test_one_flipped_bit_of_five_thousand_outputs_is_reported(row: int) -> None:
    key = "f16.f32"
    case, p = ProbeCase.of(key), probes(key)
    d = by_registry("hopper.mma.k16.f16.f32", case, p.a, p.b, p.c, 16)
    bits = d.astype(np.float32).view(np.uint32)
    bits[row, row % 16] ^= 1
    one = identify_product(p, bits.view(np.float32).astype(np.float64))
    assert one.name is None
    assert one.explained < one.asked
    assert f"row {row}, " in one.findings[-1]


def test_swapped_operands_and_a_c_that_takes_no_part_are_said() -> None:
    key = "f16.f32"
    case, p = ProbeCase.of(key), probes(key)
    d = by_registry("hopper.mma.k16.f16.f32", case, p.a, p.b, np.zeros_like(p.c), 16)
    assert "C to the product," in identify_product(p, d).findings[0]
    p = replace(p, c=np.repeat(p.c[::16], 16))  # one c a tile: D's transpose is then a product of the same c
    d = by_registry("hopper.mma.k16.f16.f32", case, p.a, p.b, p.c, 16)
    turned = d.reshape(-1, 16, 16).swapaxes(1, 2).reshape(d.shape)
    assert "swapped" in identify_product(p, turned).findings[0]
    assert "not the expected product," in identify_product(p, np.roll(d, 5, axis=0)).findings[0]
    key = "e4m3e5m2.f32"
    p, other = probes(key), ProbeCase.of("e5m2e4m3.f32")
    from npusim.studies.probe.files import decoded, encoded

    a, b = decoded(encoded(p.a, "float8_e4m3fn"), "float8_e5m2"), decoded(encoded(p.b, "float8_e5m2"), "float8_e4m3fn")
    d = by_registry("hopper.wgmma.k32.e5m2e4m3.f32", other, a, b, p.c, 16)
    assert "formats of A and B are swapped" in identify_product(p, d).findings[0]


def test_operands_cut_to_tf32_and_flushed_subnormals_are_named() -> None:
    key = "f32.f32.to_f32"
    case, p = ProbeCase.of(key), probes(key)
    text = "(c+0..7):fraction-25:rounding-toward_zero:input_bits-10:input_rounding-nearest_even:flush-both"
    unit = parse_tree(text)
    unit = replace(unit, tree=trees.repeated(unit.tree, K))
    one = identify_product(p, predicted(unit, case, (p.a, p.b, p.c), case.formats[2], "nearest_even")[:, None])
    answers = {a.question: a.answer for a in one.answers}
    still = {a.question: a.open for a in one.answers}
    assert answers["operands as read"] == "10 fraction bits, nearest_even"
    assert "operands and results are 0" in (answers["subnormals"], *still["subnormals"])
    assert one.explained == one.asked


def test_a_split_along_k_is_told_from_the_units_steps() -> None:
    short, long = ProbeCase("f16.f32"), ProbeCase("f16.f32", LONG_K)
    p, q = probes_of(short), probes_of(long)
    steps = trees.repeated(parse_tree("(c+0..15)").tree, LONG_K)
    halves = trees.products_of(trees.repeated(parse_tree("(c+0..15)").tree, LONG_K // 2))
    moved = trees.with_leaves(halves, lambda k: k + LONG_K // 2)
    unit = parse_tree("(c+0..15)")
    d = compute(replace(unit, tree=trees.repeated(unit.tree, K)), short.formats, p.a, p.b, p.c)[:, None]
    one = identify_product(p, d)
    for tree, words in ((steps, "the same steps of 16"), ((halves, moved), "K is cut into 2 parts")):
        c = q.c if tree is steps else 0 * q.c
        asked = replace(q, c=c)
        answer = goes_on(one, asked, compute(replace(unit, tree=tree), long.formats, q.a, q.b, c)[:, None])
        assert answer.answer.startswith(words)
        assert answer.explained == answer.asked


def test_the_slow_path_is_a_scalar_model_in_rational_numbers() -> None:
    case, p = ProbeCase("f16.f32"), fresh("f16.f32")
    rows = np.random.default_rng(SEED).permutation(len(p.a))[:12]
    for seed in range(10):
        _, unit = draw_unit(np.random.default_rng(SEED + 100 + seed), "float32")
        got = compute(unit, case.formats, p.a[rows], p.b[rows], p.c[rows])
        wanted = [scalar_product(unit, case.formats, p.a[n], p.b[n], float(p.c[n])) for n in rows]
        assert same(got, np.array(wanted)).all(), str(unit)


def test_recorded_vectors_do_not_exclude_the_truth() -> None:
    if not (GOLDEN / "mma_leeds.npz").exists():
        pytest.skip("recorded vectors are not here")
    assert_survives("mma_leeds.npz", ["volta.mma.k4.f16.f32@V100"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", ["mma_leeds.npz", "mma_h200.npz"])
def test_no_recorded_vector_excludes_the_truth(file: str) -> None:
    if not (GOLDEN / file).exists():
        pytest.skip("recorded vectors are not here")
    assert_survives(file, list(load_vectors(GOLDEN / file)))


def assert_survives(file: str, names: list[str]) -> None:
    vectors = load_vectors(GOLDEN / file)
    for name in names:
        left = survivors(vectors[name])
        u = vectors[name].arithmetic
        assert u.name in left.registered
        assert left.units
        assert str(u.fraction_bits or "all") in left.left["bits kept in a step"]
        assert u.rounding in left.left["rounding of a step"]
