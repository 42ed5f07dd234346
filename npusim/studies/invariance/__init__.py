"""Changes to a call that change its bits, changes that cannot, and the costs of preventing a change of bits."""

from npusim.studies.invariance.examination import ASPECTS, Finding, Invariance, Tried, examine, invariant

__all__ = ["ASPECTS", "Finding", "Invariance", "Tried", "examine", "invariant"]
