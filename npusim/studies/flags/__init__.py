"""Checks explicit flags and barriers of an expert program: races, waits without a set, lost sets, cycles."""

from npusim.studies.flags.bounded_check import FlagReport, check_every_length, check_program
from npusim.studies.flags.every_length import Proof
from npusim.studies.flags.order import Fault

__all__ = ["Fault", "FlagReport", "Proof", "check_every_length", "check_program"]
