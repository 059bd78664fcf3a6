"""Metrics, ledger and explanations: pure functions of a run's records. Imports ``loop`` and
``op_times``.

Read ``metrics.py`` first: per request, per iteration and in all.
"""
