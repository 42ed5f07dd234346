"""Why a file cannot be read: its name is free, or something else has it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from npusim.errors import absent

if TYPE_CHECKING:
    from pathlib import Path


def test_the_reason_names_what_has_the_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert absent(tmp_path / "gone") == "no such file"
    assert absent(tmp_path / "gone", "workload file") == "no such workload file"
    assert absent(tmp_path) == "this is a folder, not a file"
    assert absent(tmp_path / "pipe") == "this is a device, a pipe or a socket, not a file"
    assert (
        absent(tmp_path / "link") == absent(tmp_path / "circle") == "no such file: the link of that name leads nowhere"
    )
