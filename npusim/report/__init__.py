"""What people and programs get of a run: tables, files, traces, comparisons.

Import from its modules: ``record`` (what is kept of a run, and ``result.json``), ``tables`` (a run's, of ``times``
and ``bits``), ``compare``, ``search``, ``pipes``, ``trace``, ``output`` (the run folder).
"""
