"""The points to measure, their order, and the journal of measured ones (no torch). Imports
``bundle``.

Read ``settings.py`` first: the ops and their coarse grids.
"""
