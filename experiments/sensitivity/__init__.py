"""What moves a capacity, or a run's metrics, and by how much. Imports ``capacity``.

Read ``factors.py`` first (what is changed, one at a time), then ``elasticities.py`` (what that
does).
"""
