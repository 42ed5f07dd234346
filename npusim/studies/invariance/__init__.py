"""Changes to a call that change its bits, changes that cannot, and the costs of excluding them."""

from npusim.studies.invariance.examination import ASPECTS, Finding, Invariance, Tried, examine, invariant

__all__ = ["ASPECTS", "Finding", "Invariance", "Tried", "examine", "invariant"]
