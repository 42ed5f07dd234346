"""Judges kernels in one call: whether they are right, whether their bits equal the reference's, their time, and whether
to trust that time.
"""

from npusim.studies.evaluate.evaluation import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
