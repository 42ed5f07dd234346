"""Searches inputs for those on which a schedule's numbers break, and names the first wrong step."""

from npusim.stress.search import Choice, Outcome, Stress, check_requirement, examine, stress

__all__ = ["Choice", "Outcome", "Stress", "check_requirement", "examine", "stress"]
