"""Sweeps: many runs from one file, on this machine or on a Dask cluster, interrupted and resumed.

Start with ``plan.py`` (from a file to runs with keys), ``execute.py`` (the loop that hands them out
and takes in what comes back) and ``store.py`` (where results lie).
"""
