"""Sweeps: many runs from one file, on local processes or a Dask cluster, with resumption.

Read ``plan.py`` first (from a file to runs with keys), then ``execute.py`` (the loop that sends
runs to workers and stores their results) and ``store.py`` (the sweep's folder)."""
