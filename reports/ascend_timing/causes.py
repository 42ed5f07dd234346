"""Causes of residuals: the time that hosts add to consecutive kernels."""

from __future__ import annotations

from fnmatch import fnmatchcase
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config.load import load_device
from npusim.studies.validate.measured_times import Predictor
from reports.ascend_timing import study

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Times of consecutive calls, by the source that measured them.
ROWS: Mapping[str, str] = MappingProxyType(
    {
        "PTO's kernels, one and eight cores": "fa_x86_*",
        "PTO's kernels, all cores": "fa_b2b_*",
        "torch.matmul": "torchmm_*",
        "PTO-DSL's products": "ptodsl_*",
        "CANN's attention through torch": "cann_*",
    }
)


def hosts() -> dict[str, tuple[int, float, float]]:
    """Return cases and median errors of calls in a row: host and device in parallel, or one after the other."""
    predictor, found = Predictor(), {}
    for who, pattern in ROWS.items():
        errors = []
        for case in (c for c in study.cases() if fnmatchcase(c.name, pattern)):
            timing, measured = predictor.result(case).timing, case.measured.latency_us
            issue = load_device(case.device).timed_launch().host_issue_s
            assert timing is not None
            assert measured is not None
            assert issue is not None
            device = (timing.cycles / timing.clock_hz + timing.stream_s) * 1e6
            host = case.host_floor_us or issue.value * 1e6
            errors.append([abs(measured.relative_error(us)) for us in (max(host, device), host + device)])
        larger, added = (median(e[i] for e in errors) for i in range(2))
        found[who] = len(errors), larger, added
    return found
