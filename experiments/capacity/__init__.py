"""The capacity of deployments under an SLO, the choice of one, and the sensitivity of both.

Read ``search.py`` first (from probes to a capacity), then ``probing.py`` (probes as runs of a
sweep), ``recommend.py`` (from a question to deployments; its bounds are in ``bounds.py``) and
``sensitivity.py`` (the effect of each factor, changed one at a time)."""
