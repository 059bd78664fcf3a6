"""Replay a workload through a scheduler on predicted op times, and account for every second.

Start with these three files: ``replica.py`` (the main loop), ``predictor.py`` (how long a batch
takes) and ``ledger.py`` (where the idle time went).
"""
