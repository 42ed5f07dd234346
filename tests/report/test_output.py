from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from npusim.errors import OutputError
from npusim.report import output
from npusim.report.output import check_writable, save_run, save_trace, write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.run_result import RunResult


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_folder_holds_result_pipes_and_trace_and_nothing_beside_it(
    tmp_path: Path, result: RunResult
) -> None:
    folder = save_run(result, tmp_path / "runs" / "a")
    assert _names(folder) == {"result.json", "figures.json", "pipes.csv", "trace.pftrace"}
    assert _names(tmp_path / "runs") == {"a"}, "no temporary folder is left"


def test_output_tensor_says_which_rows_were_computed(tmp_path: Path, overflowed: RunResult) -> None:
    from safetensors import safe_open

    folder = save_run(overflowed, tmp_path / "a", trace="chrome", save_output=True)
    assert _names(folder) == {
        "result.json", "figures.json", "pipes.csv", "trace.json", "output.safetensors",
    }  # fmt: skip
    with safe_open(folder / "output.safetensors", framework="numpy") as file:
        tensor, computed = file.get_tensor("o"), file.get_tensor("computed")
        assert file.metadata()["layout"] == "BNSD"
    assert tensor.shape == (1, 5, 512, 128)
    assert tensor.dtype == np.float16
    assert computed.sum() == 4
    assert np.isfinite(tensor[computed.astype(bool)]).all()
    assert np.isnan(tensor[~computed.astype(bool)]).all()


def test_earlier_run_is_replaced_whole(tmp_path: Path, result: RunResult) -> None:
    save_run(result, tmp_path / "a", trace="chrome")
    save_run(result, tmp_path / "a", trace="none")
    assert _names(tmp_path / "a") == {"result.json", "figures.json", "pipes.csv"}
    assert _names(tmp_path) == {"a"}


def test_folder_with_other_files_is_not_replaced(tmp_path: Path, result: RunResult) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds 'notes\.txt', which is no file of a run"):
        save_run(result, tmp_path)
    assert _names(tmp_path) == {"notes.txt"}


def test_failure_while_writing_leaves_the_earlier_run(
    tmp_path: Path, result: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(result, tmp_path / "a", trace="none")
    before = (tmp_path / "a" / "result.json").read_bytes()

    def full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "trace_bytes", full)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        save_run(result, tmp_path / "a")
    assert _names(tmp_path) == {"a"}
    assert (tmp_path / "a" / "result.json").read_bytes() == before


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_place_that_is_no_folder_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"):
        check_writable(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="no permission"):
        check_writable(tmp_path / "a")


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "deep" / "a")
    assert _names(tmp_path) == set()


def test_trace_alone_takes_its_format_from_the_name(tmp_path: Path, result: RunResult) -> None:
    save_trace(result, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["profilingType"] == "op"
    save_trace(result, tmp_path / "a.pftrace")
    assert _names(tmp_path) == {"a.json", "a.pftrace"}


def test_single_file_that_cannot_be_written_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_whole(tmp_path / "file" / "below", b"")
