"""The capacity of deployments under an SLO, the choice of one, and the sensitivity of both. Read
``search.py`` first (from probes to a capacity), then ``probing.py`` (probes as runs of a sweep),
``recommend.py`` (from a question to deployments) and ``sensitivity.py`` (one factor at a time)."""
