"""The comparison of recorded commands with an earlier commit: what it counts, and its table."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.bench.__main__ import ROOT, main

if TYPE_CHECKING:
    from pathlib import Path

#: A process that starts another one and ends at once; the other one then works for a third of a second.
OUTLIVED = """
import subprocess, sys
work = "import time\\nwhile time.process_time() < 1 / 3: pass"
subprocess.Popen([sys.executable, "-S", "-c", work])
"""
#: Measures it, in a process without other children.
MEASURED = """
import os, pathlib, sys
from tests.bench.__main__ import cpu_s
output = os.open(os.devnull, os.O_WRONLY)
print(*cpu_s([sys.executable, "-S", "-c", sys.argv[1]], output, pathlib.Path(sys.argv[2]), os.environ))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="descendants that nobody waits for are counted on Linux")
def test_time_of_descendants_that_outlive_a_command_counts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURED, OUTLIVED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    spent, code = done.stdout.split()
    assert float(spent) > 1 / 3
    assert code == "0"


def test_an_unknown_command_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--against", "HEAD", "explores"])
    assert ended.value.code == 2
    assert "unknown command 'explores'; there are pasa, time alone" in capsys.readouterr().err
