"""Sweeps: many runs from one file, on local processes or a Dask cluster, with resumption. Read
``plan.py`` first (runs with keys), then ``execute.py`` (the loop) and ``store.py`` (the folder)."""
