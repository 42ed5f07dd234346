"""Searches for inputs on which a schedule's numbers break, and names the first wrong step."""

from npusim.studies.stress.worst_search import PointError, Stress, examine, stress

__all__ = ["PointError", "Stress", "examine", "stress"]
