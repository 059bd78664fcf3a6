"""Predictions beside what real servers measured. Imports ``sweeps`` and ``run``.

Of tables of means read ``measured.py`` first (a row: a deployment, a load and what was measured),
then ``errors.py`` (how far off predictions are, by group). Of runs with the times of every request
read ``runs.py``.
"""
