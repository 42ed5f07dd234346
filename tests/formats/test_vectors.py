from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.errors import FormatError, TensorError
from npusim.formats import matmul
from npusim.studies.validate.vectors import check_vectors, load_vectors

if TYPE_CHECKING:
    from pathlib import Path

NAME = "volta.mma.k4.f16.f32@V100"


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((5, 2, 4)).astype(np.float16)
    b = rng.standard_normal((5, 4, 3)).astype(np.float16)
    c = rng.standard_normal((5, 2, 3)).astype(np.float32)
    d = matmul(a, b, c, arithmetic="volta.mma.k4.f16.f32")
    typed = {"A": (a, "u2"), "B": (b, "u2"), "C": (c, "u4"), "D": (d, "u4")}
    stored = {f"{NAME}/{role}": array.view(dtype) for role, (array, dtype) in typed.items()}
    stored[f"{NAME}/kind"] = np.arange(5, dtype=np.uint8)
    stored.update({f"{NAME}/{role}": array for role, array in changes.items()})
    return {key: array for key, array in stored.items() if array is not None}


def saved(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "vectors.npz"
    np.savez(path, **content)
    return path


def test_equal_vectors_all_match(tmp_path: Path) -> None:
    report = check_vectors(saved(tmp_path, arrays()))[NAME]
    assert (report.matched, report.total, report.first_mismatch) == (30, 30, None)


def test_first_mismatch_is_shown_as_bits_and_values(tmp_path: Path) -> None:
    content = arrays()
    d = content[f"{NAME}/D"].copy()
    d[3, 1, 2] ^= 1
    content[f"{NAME}/D"] = d
    report = check_vectors(saved(tmp_path, content))[NAME]
    assert (report.matched, report.total) == (29, 30)
    assert report.first_mismatch is not None
    assert report.first_mismatch.startswith("case 3 (kind 3), row 1, column 2: got 0x")
    assert f"expected 0x{int(d[3, 1, 2]):08x} = " in report.first_mismatch


def test_nan_and_signed_zero_are_compared_as_bits(tmp_path: Path) -> None:
    content = arrays()
    content[f"{NAME}/A"] = np.full((5, 2, 4), 0x7E00, np.uint16)  # NaN operands
    content[f"{NAME}/D"] = np.full((5, 2, 3), 0x7FFFFFFF, np.uint32)
    assert check_vectors(saved(tmp_path, content))[NAME].matched == 30
    content[f"{NAME}/D"] = np.full((5, 2, 3), 0x7FC00000, np.uint32)
    assert check_vectors(saved(tmp_path, content))[NAME].matched == 0


def test_kind_is_optional(tmp_path: Path) -> None:
    assert load_vectors(saved(tmp_path, arrays(kind=None)))[NAME].kind is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"D": None}, "V100/D is missing"),
        ({"A": np.zeros((5, 2, 4), np.float16)}, "V100/A is float16 with 3 axes; needs uint16"),
        ({"A": np.zeros((5, 4), np.uint16)}, "V100/A is uint16 with 2 axes"),
        ({"B": np.zeros((5, 3, 3), np.uint16)}, r"V100/B has shape \(5, 3, 3\); A and B need"),
        ({"C": np.zeros((5, 2, 1), np.uint32)}, r"V100/C has shape \(5, 2, 1\)"),
        ({"D": np.zeros((4, 2, 3), np.uint32)}, r"V100/D has shape \(4, 2, 3\)"),
        ({"kind": np.zeros(4, np.uint8)}, r"V100/kind has shape \(4,\)"),
        (
            {"A": np.zeros((5, 2, 6), np.uint16), "B": np.zeros((5, 6, 3), np.uint16)},
            "has K = 6; volta.mma.k4.f16.f32 adds 4",
        ),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = saved(tmp_path, arrays(**changes))
    with pytest.raises(TensorError, match=message) as caught:
        load_vectors(path)
    assert str(path) in str(caught.value)


def test_unknown_unit_lists_near_names(tmp_path: Path) -> None:
    content = {key.replace("volta", "vulta"): array for key, array in arrays().items()}
    with pytest.raises(FormatError, match=r"near names: volta\.mma\.k4\.f16\.f32"):
        load_vectors(saved(tmp_path, content))


def test_keys_of_another_form_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"weights": np.zeros(3)})
    with pytest.raises(TensorError, match="keys must be <name>@<chip>"):
        load_vectors(path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {f"{NAME}/A": np.array([{"run": "me"}], dtype=object)})
    with pytest.raises(TensorError, match="holds pickled objects, which are refused"):
        load_vectors(path)


def test_a_plain_pickle_file_is_refused(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "vectors.npz"
    path.write_bytes(pickle.dumps({"A": 1}))
    with pytest.raises(TensorError, match=r"vectors\.npz"):
        load_vectors(path)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.999])
def test_truncated_files_are_refused(tmp_path: Path, keep: float) -> None:
    path = saved(tmp_path, arrays())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(TensorError, match=r"vectors\.npz"):
        load_vectors(path)


def test_flipped_bytes_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, arrays())
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(content)
    with pytest.raises(TensorError, match=r"vectors\.npz"):
        load_vectors(path)


def test_missing_file_and_single_array_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TensorError, match="no such file"):
        load_vectors(tmp_path / "none.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(TensorError, match="not a readable tensor file"):
        load_vectors(tmp_path / "one.npy")
