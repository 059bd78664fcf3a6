"""How much load deployments carry under an SLO, and which one to choose. Imports ``sweeps``.

Read ``search.py`` first (from probes to a capacity), then ``probing.py`` (probes as runs of a
sweep) and ``recommend.py`` (from a question to deployments).
"""
