"""One experiment: run, compare, chunk sizes. Read first: ``experiment.py``."""
