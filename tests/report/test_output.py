from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from npusim.errors import OutputError
from npusim.report.output import check_writable, save_run, save_trace, write_whole
from npusim.report.result_json import load_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.simulation.run_result import RunData

pytestmark = pytest.mark.usefixtures("declared_tiles")


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_folder_holds_result_pipes_and_trace_and_nothing_beside_it(tmp_path: Path, result: RunData) -> None:
    folder = save_run(result, tmp_path / "runs" / "a")
    assert _names(folder) == {"result.json", "figures.json", "pipes.csv", "trace.json"}
    assert _names(tmp_path / "runs") == {"a"}, "no temporary folder is left"


def test_output_tensor_says_which_rows_were_computed(tmp_path: Path, overflowed: RunData) -> None:
    from safetensors import safe_open

    folder = save_run(overflowed, tmp_path / "a", save_output=True)
    assert _names(folder) == {"result.json", "figures.json", "pipes.csv", "trace.json", "output.safetensors"}
    with safe_open(folder / "output.safetensors", framework="numpy") as file:
        tensor, computed = file.get_tensor("o"), file.get_tensor("computed")
        assert file.metadata()["layout"] == "BNSD"
    assert tensor.shape == (1, 5, 512, 128)
    assert tensor.dtype == np.float16
    assert computed.sum() == 4
    assert np.isfinite(tensor[computed.astype(bool)]).all()
    assert np.isnan(tensor[~computed.astype(bool)]).all()
    content = (folder / "output.safetensors").read_bytes()
    for _ in range(8):
        save_run(overflowed, folder, trace=False, save_output=True)
        assert (folder / "output.safetensors").read_bytes() == content


def test_earlier_run_is_replaced_whole(tmp_path: Path, result: RunData) -> None:
    save_run(result, tmp_path / "a")
    save_run(result, tmp_path / "a", trace=False)
    assert _names(tmp_path / "a") == {"result.json", "figures.json", "pipes.csv"}
    assert _names(tmp_path) == {"a"}


def test_folder_with_other_files_is_not_replaced(tmp_path: Path, result: RunData) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"contains 'notes\.txt', which is not a file of a run,"):
        save_run(result, tmp_path)
    assert _names(tmp_path) == {"notes.txt"}


def test_failure_while_writing_leaves_the_earlier_run(
    tmp_path: Path, result: RunData, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(result, tmp_path / "a", trace=False)
    before = (tmp_path / "a" / "result.json").read_bytes()

    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        save_run(result, tmp_path / "a")
    assert _names(tmp_path) == {"a"}
    assert (tmp_path / "a" / "result.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "is a file"),
        ("file/below", "file is not a folder"),
        ("loop/x", "loop is not a folder"),
        ("loop", "loop is not a folder"),
        ("pipe", "is a file"),
    ],
)
def test_place_that_is_no_folder_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match=why):
        check_writable(Path(name))


@pytest.mark.parametrize(("name", "why"), [("pipe", "pipe or a device"), ("folder", "a folder"), ("loop/x", "loop is")])
def test_a_file_is_not_written_over_what_is_none(tmp_path: Path, name: str, why: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    before = _names(tmp_path)
    with pytest.raises(OutputError, match=why):
        write_whole(tmp_path / name, b"")
    assert _names(tmp_path) == before


def test_a_run_goes_into_the_folder_one_is_in(tmp_path: Path, result: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_run(result, ".")
    save_run(result, ".", trace=False)
    assert _names(tmp_path) == {"result.json", "figures.json", "pipes.csv"}


def _killed_at(step: int, work: Callable[[], object]) -> bool:
    """Do some work in a process that ends before its ``step``-th change of a file; return whether it came so far."""
    changes = iter(range(step))
    changing = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod", "open"}

    def end(event: str, _arguments: object) -> None:
        if event in changing and next(changes, None) is None:
            os._exit(9)

    child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(end)
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_kill_leaves_a_whole_run_or_none_and_the_next_run_clears_up(
    tmp_path: Path, result: RunData, *, is_forced: bool
) -> None:
    """Killed before each of its steps in turn; another run, written over by force, is never mixed with the new one."""
    place = tmp_path / "a"
    old, new = replace(result, name="old", digest="other" if is_forced else result.digest), replace(result, name="new")
    earlier = save_run(old, tmp_path / "earlier")
    seen = set()
    for step in range(200):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(earlier, place)
        if not _killed_at(step, lambda: save_run(new, place, trace=False, is_forced=is_forced)):
            break
        names = {name for name in _names(place) if not name.startswith(".")}
        seen.add(load_result(place).name if "result.json" in names else "none")
        assert is_forced or names >= {"result.json", "figures.json", "pipes.csv"}
        for left in place.iterdir():
            os.utime(left, (0, 0))  # as if it had been some time ago
    assert seen == {"old", "new"} | ({"none"} if is_forced else set())
    assert 10 < step < 199
    save_run(new, place, is_forced=True)
    assert _names(place) == {"result.json", "figures.json", "pipes.csv", "trace.json"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="no permission"):
        check_writable(tmp_path / "a")


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "deep" / "a")
    assert _names(tmp_path) == set()


def test_trace_alone_is_a_file_that_chrome_and_insight_read(tmp_path: Path, result: RunData) -> None:
    save_trace(result, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["profilingType"] == "op"


def test_single_file_that_cannot_be_written_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_whole(tmp_path / "file" / "below", b"")
