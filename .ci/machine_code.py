"""Build hook: a wheel with machine code for the baseline of the builder's kind of processor (`npusim.formats.shipped`).

Off by default: ``HATCH_BUILD_HOOKS_ENABLE=1 python -m pip wheel --no-deps .`` builds such a wheel, for releases.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class MachineCode(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the kernels of usual runs in a process of its own, and adds the files and a tag to the wheel."""

    folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add machine code; say so, and build the wheel without it, where there is no baseline for this processor."""
        sys.path.insert(0, self.root)
        from npusim.formats import shipped

        environment, kind = shipped.environment(), platform.machine()
        if version == "editable" or not environment:
            why = "an editable installation compiles at its first run" if environment else f"no baseline for {kind}"
            self.app.display_warning(f"no machine code: {why}")
            return
        self.folder = tempfile.TemporaryDirectory()
        given = {"NPUSIM_CACHE": self.folder.name, "PYTHONPATH": os.pathsep.join([self.root, *sys.path])}
        command = [sys.executable, "-P", "-m", "npusim", "warm"]
        subprocess.run(command, env={**os.environ, **environment, **given}, check=True, stdout=subprocess.DEVNULL)
        files = sorted(Path(self.folder.name).glob("*.code"))
        if not files:
            raise RuntimeError("npusim warm stored no machine code")
        self.app.display_info(f"machine code of {len(files)} kernels for {' '.join(shipped.processor())}")
        build_data["force_include"] |= {str(f): f"npusim/formats/shipped/{kind}/{f.name}" for f in files}
        # The code calls nothing but memcpy, memset, memmove and functions of libm that every glibc has.
        build_data |= {"pure_python": False, "tag": f"py3-none-manylinux_2_17_{kind}"}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the files."""
        if self.folder is not None:
            self.folder.cleanup()
