"""The points to measure, their order, and the journal of measured ones (no torch). Imports
``bundle``.

Read ``grid.py``: settings, coarse grids, the next point, the journal.
"""
