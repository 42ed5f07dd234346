"""Tiles that were chosen are kept in the cache folder: another process does not try them again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from npusim import cache
from npusim.errors import SpecError
from npusim.simulation import chosen_tile
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request


def test_a_choice_is_read_back_until_a_file_of_the_package_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise SpecError("tried anew")

    def chosen(**request: object) -> chosen_tile.TileChoice:
        chosen_tile._choice.cache_clear()
        return chosen_tile.choose_tile(plan_of(Request("flash", seq=320, tensor_parallel=8, **request)))  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "package_digest", lambda: b"one state of the files")
    first = chosen()
    monkeypatch.setattr(chosen_tile, "_tried_out", refuse)
    assert chosen() == first != chosen_tile.TileChoice()
    for other in ({"l2": "warm"}, {"overrides": {"flags.cross_core_latency_cycles": 12345}}, {"causal": False}):
        with pytest.raises(SpecError, match="tried anew"):
            chosen(**other)
    monkeypatch.setattr(cache, "package_digest", lambda: b"another")
    with pytest.raises(SpecError, match="tried anew"):
        chosen()
    chosen_tile._choice.cache_clear()


#: Says how often tiles were tried for one call of a plug-in.
CALL = """
from npusim.simulation import chosen_tile as tile
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request

tried, count = tile._tried_out, []
tile._tried_out = lambda *of: count.append(1) or tried(*of)
print(len(count), tile.choose_tile(plan_of(Request("plug.py:PLUG", seq=320, tensor_parallel=8))).fields, len(count))
"""
STARTS = Path(__file__).parent / "plugins" / "starts.py"


def test_a_choice_for_a_plug_in_is_read_back_until_a_file_of_it_changes(tmp_path: Path) -> None:
    """A file that it imports counts, one that lies beside it does not."""
    (tmp_path / "plug.py").write_text(STARTS.read_text(encoding="utf-8") + "\nimport beside\nPLUG = WRITTEN\n")
    (tmp_path / "beside.py").write_text("")

    def tried() -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-c", CALL], cwd=tmp_path, capture_output=True, text=True, check=True)
        _, _, rest = done.stdout.partition(" ")
        fields, _, count = rest.rpartition(" ")
        return int(count), fields

    first = tried()
    assert first[0] == 1
    (tmp_path / "other.py").write_text("# new\n")
    assert tried() == (0, first[1])
    (tmp_path / "beside.py").write_text("# changed\n")
    assert tried() == first
