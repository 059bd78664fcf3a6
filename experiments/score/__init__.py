"""Predictions beside what real servers measured. Imports ``sweeps``.

Read ``measured.py`` first (a row: a deployment, a load and what was measured), then ``errors.py``
(how far off predictions are, by group).
"""
