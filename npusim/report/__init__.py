"""Outputs of runs: tables, files, traces, comparisons, pages.

Import from its modules: ``record`` (``result.json``), ``tables`` (a run's, of ``times`` and ``bits``), ``findings``,
``compare``, ``search``, ``pipes``, ``trace``, ``page``, ``output`` (the run folder).
"""
