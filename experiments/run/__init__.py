"""One experiment: run, print, compare, chunk sizes. Imports ``results``.

Read ``experiment.py`` first: what ``sarathi-sim run`` does."""
