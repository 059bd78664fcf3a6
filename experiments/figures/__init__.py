"""Figures of runs: distributions, timelines, fits. Imports ``results``.

Read ``distributions.py`` first: the figures of a run.
"""
