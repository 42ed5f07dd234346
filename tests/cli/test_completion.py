"""TAB behind ``-t``, ``-f``, ``--precision`` and ``-C`` offers the words of the schedule and device that are named."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app


def offered(line: str) -> list[str]:
    """Return what bash is offered behind a line."""
    env = {
        "_NPUSIM_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "NO_COLOR": "1",
    }
    return CliRunner().invoke(app, [], env=env, prog_name="npusim").output.split()


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("npusim run flash -t block", {"block_q=", "block_kv="}, {"depth="}),
        ("npusim run flash -t depth=2,block_k", {"depth=2,block_kv="}, {"block_kv="}),
        ("npusim run flash -t pipeline=", {"pipeline=core"}, {"block_q="}),
        ("npusim run volta_flash --precision a", {"acc_fp32"}, {"fa2_fp32"}),
        ("npusim run flash --hw h200 -C links.hbm", {"links.hbm.bytes_per_s="}, {"clock_hz="}),
        ("npusim explore flash,pasa -f b", {"block_kv=", "batch="}, {"depth="}),
        ("npusim explore flash -f group_", {"group_count="}, set()),
        ("npusim run nosuch -t b", set(), {"block_q="}),
        ("npusim run flash --hw asc", {"ascend_910b2"}, {"h200"}),
    ],
)
def test_words_of_the_schedule_and_device_are_offered(line: str, some: set[str], none: set[str]) -> None:
    words = {*offered(line)}
    assert some <= words, words
    assert not none & words
