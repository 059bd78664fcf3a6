"""What to measure, in which order, and what was measured so far. torch-free. Imports ``bundle``.

Read ``settings.py`` first: the ops and their coarse grids.
"""
