"""Which changes to how a call is run change its bits, which cannot, and what ruling them out costs."""

from npusim.invariance.examination import ASPECTS, Finding, Invariance, Tried, examine, invariant

__all__ = ["ASPECTS", "Finding", "Invariance", "Tried", "examine", "invariant"]
