"""One experiment: run it, print it, plot it, compare it, take advice from it. Imports ``figures``.

Read ``experiment.py`` first: what ``sarathi-sim run`` does.
"""
