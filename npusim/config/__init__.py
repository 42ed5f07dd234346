"""Readers of files and of the command line: devices, workloads, problems, tilings.

The only package that uses YAML and pydantic.  Import from its modules: ``load`` (``load_device``, ``load_workload``,
``-C``), ``device``, ``node``, ``workload``, ``problem``, ``tiling``, ``cases``, ``huggingface``.
"""
