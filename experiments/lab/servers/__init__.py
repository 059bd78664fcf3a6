"""Tables of measured servers beside their simulation. Read first: ``score.py``; then ``rows.py``
(what a table says), ``scenarios.py`` (its deployments), and ``mlperf.py``, another reader."""
