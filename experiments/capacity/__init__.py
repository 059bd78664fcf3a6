"""How much load deployments carry under an SLO, which one to choose, and what moves that. Imports
``sweeps``.

Read ``search.py`` first (from probes to a capacity), then ``probing.py`` (probes as runs of a
sweep), ``recommend.py`` (from a question to deployments) and ``sensitivity.py`` (what is changed,
one at a time, and what that does).
"""
