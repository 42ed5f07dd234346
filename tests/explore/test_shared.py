"""What points of a search share in a process, each gives alone: templates and costs by the banks of their tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npusim.explore.bounds import work_bound
from npusim.ir import content
from npusim.machines.ascend import rows
from npusim.simulation.request import Request
from npusim.simulation.variants import Variants

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

#: Ping-pong of a row of sums moves the output by 128 bytes for each tile ahead: its bank meets that of PV at some.
POINTS = [{"block_q": 64, "block_kv": keys, "depth": depth} for keys in (128, 208) for depth in (1, 2, 3, 4, 5)]


def outcomes(*, is_shared: bool) -> Iterator[Any]:
    content.memo.cache_clear()
    variants = Variants(Request("flash", hw="ascend_910b2", heads=4, seq=600, numerics=False), is_open=True)
    for point in POINTS:
        if not is_shared:
            content.memo.cache_clear()
        built = variants.built(tuple(point.items()))
        bounds = [work_bound(built.program, built.plan.device, is_placed=is_placed) for is_placed in (True, False)]
        built.check()
        yield bounds, built.timing().cycles


def test_points_share_no_more_than_what_they_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(outcomes(is_shared=False))
    assert list(outcomes(is_shared=True)) == alone
    monkeypatch.setattr(rows, "places_in", lambda *_: ())  # as if banks did not matter
    assert any(found != own for found, own in zip(outcomes(is_shared=True), alone, strict=True))
