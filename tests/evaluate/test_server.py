"""A real client of the Model Context Protocol talks to the server."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="npusim[serve] is not installed")
HERE = Path(__file__).parent
TOOLS = {"evaluate", "predict", "tune", "explain", "stress", "program", "devices"}
CALL = {"hw": "h200", "seq": 256}


def answers(*calls: tuple[str, dict[str, Any]]) -> tuple[set[str], list[Any]]:
    """Return the names of the tools, and the results of calls of one session."""
    import anyio
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def talk() -> tuple[set[str], list[Any]]:
        package = str(HERE.parents[1])
        how = StdioServerParameters(
            command=sys.executable, args=["-m", "npusim", "serve"], env={**os.environ, "PYTHONPATH": package}
        )
        async with stdio_client(how) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            tools = await session.list_tools()
            return {t.name for t in tools.tools}, [await session.call_tool(*call) for call in calls]

    return anyio.run(talk)


def test_a_client_gets_typed_answers_and_errors_in_words(tmp_path: Path) -> None:
    hostile = tmp_path / "hostile.py"
    hostile.write_text("import os\nos._exit(3)\n", encoding="utf-8")
    kernels = [f"{hostile}:k", f"{HERE / 'attention_kernels.py'}:half"]
    tools, (devices, time, wrong, judged, again) = answers(
        ("devices", {}),
        ("predict", {"kernel": "flash", "call": CALL}),
        ("predict", {"kernel": "flsh", "call": CALL}),
        ("evaluate", {"kernels": kernels, "call": CALL}),
        ("predict", {"kernel": "flash", "call": CALL}),
    )
    assert tools == TOOLS
    assert "h200" in {d["name"] for d in devices.structured_content["devices"]}
    assert time.structured_content["mid"] > 0
    assert wrong.is_error
    assert "unknown schedule" in wrong.content[0].text
    crashed, half = judged.structured_content["kernels"]
    assert (crashed["verdict"], half["verdict"]) == ("wrong", "wrong")
    assert "exit code 3" in crashed["looks_like"]
    assert "a constant output" in half["looks_like"]
    assert again.structured_content == time.structured_content
