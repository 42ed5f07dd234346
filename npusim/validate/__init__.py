"""Compares predicted times with measured ones, and a kernel's output with predicted bits."""

from npusim.validate.times import TimesReport
from npusim.validate.times import validate_times as validate

__all__ = ["TimesReport", "validate"]
