"""The figures of a diagnosis as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Ranges by what they are of; keys end in ``_min`` and ``_max``.
_RANGES = (("K", "key"), ("K'", "shifted_key"), ("Q K^T", "raw_score"), ("in the accumulator", "score"))


def diagnosis_lines(figures: Mapping[str, float]) -> list[str]:
    """Return a line each on ranges, resonance, what became zero, and what was cut off."""
    ranges = [
        f"{name} [{figures[f'{key}_min']:,.4g}, {figures[f'{key}_max']:,.4g}]"
        for name, key in _RANGES
        if f"{key}_min" in figures
    ]
    found = [
        f"ranges: {', '.join(ranges)}",
        f"resonance: Q against K {figures['resonance_phase_degrees']:.0f} degrees at frequency "
        f"{figures['resonance_frequency']:.0f}, {figures['resonance_share_percent']:.0f} % of the mean "
        f"score; mean cosine {figures['resonance_cosine']:.3f}",
        f"NaN rows {figures['nan_row_percent']:.3g} %; sinks hold {figures['sink_mass_percent']:.3g} % "
        "of the mass",
    ]
    if "underflow_percent" in figures:
        found.append(
            f"P underflow: {figures['underflow_percent']:.3g} % of pairs, mass lost "
            f"{figures['zeroed_mass_percent']:.3g} % (P-Cast's product says "
            f"{figures['product_mass_percent']:.3g} %); cut to the largest value: "
            f"{figures['saturated_count']:,.0f}"
        )
    return found
