"""Judges kernels in one call: right or wrong, the same bits or not, their time, and whether to trust it."""

from npusim.studies.evaluate.evaluation import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
