"""One experiment: run, print, plot, compare, advise. Imports ``figures``.

Read ``experiment.py`` first: what ``sarathi-sim run`` does.
"""
