"""Every command of the README runs as it stands there, on files that a reader would have: ``-m readme``."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.transcripts import README, blocks, shown

if TYPE_CHECKING:
    from pathlib import Path

TEXT = README.read_text(encoding="utf-8")
COMMANDS = tuple(
    dict.fromkeys(
        [
            *(line.partition("#")[0].strip() for line in re.findall(r"^    (npusim .*)$", TEXT, re.MULTILINE)),
            *(command for block in blocks(TEXT) for command, _ in shown(block["text"])),
        ]
    )
)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LONGEST_S = 900

pytestmark = pytest.mark.readme


def ran(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from npusim.cli import main; main()", *words]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 0, f"npusim {shlex.join(words)}: {done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the commands name: a kernel's output, kept runs, a model, measurements."""
    folder = tmp_path_factory.mktemp("reader")
    rng = np.random.default_rng(0)
    np.savez(folder / "qkv.npz", **{n: rng.standard_normal((1, 2, 256, 64)).astype("float16") for n in "qkv"})  # type: ignore[arg-type]
    ran(folder, shlex.split("run flash --hw h200 --tensors qkv.npz --rows all --save-output -o kernel --no-trace"))
    np.savez(folder / "out.npz", o=load_file(folder / "kernel" / "output.safetensors")["o"])
    for name, depth in (("a", 2), ("b", 3)):
        ran(folder, shlex.split(f"run flash --seq 256 -t depth={depth} -o runs/{name} --no-trace"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "measured.yaml").write_text(ran(folder, ["validate", "--template"]).stdout)
    (folder / "mine.py").write_text("")
    for name, text in re.findall(r"<!-- test: (\S+\.py) -->\n```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(text)
    (folder / "mine.py").unlink()
    ran(folder, ["new", "schedule", "mine"])
    shutil.copytree(README.parent / "tests" / "baselines", folder / "tests" / "baselines")
    return folder


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 25
    assert all(command.startswith("npusim ") for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_runs(command: str, reader: Path, tmp_path: Path) -> None:
    if "::" in command:
        pytest.importorskip("triton", reason="npusim[triton] is not installed")
    folder = tmp_path / "here"
    shutil.copytree(reader, folder)
    if command.startswith("npusim new schedule mine"):
        (folder / "mine.py").unlink()
    typed, _, file = command.partition(" > ")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = ran(folder, shlex.split(typed)[1:])
    assert done.stdout or {p: p.stat().st_mtime_ns for p in folder.rglob("*")} != before, "neither said nor written"
    if file:
        (folder / file).write_text(done.stdout)
        ran(folder, ["validate", file])


def test_python_of_the_readme_runs_as_it_stands_there() -> None:
    """Blocks that are files are run by the commands that name them."""
    (block,) = re.findall(r"(?<!-->\n)^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
