"""The simulator: runs a workload through a scheduler on predicted op times, and accounts for every
second.

Read three files first: ``loop/replica.py`` (the main loop), ``op_times/predictor.py`` (the time of
a batch) and ``views/ledger.py`` (the idle time by cause).
"""
