"""Compares predicted times with measured ones, and a kernel's output with predicted bits."""

from npusim.studies.validate.measured_times import TimesReport
from npusim.studies.validate.measured_times import validate_times as validate

__all__ = ["TimesReport", "validate"]
