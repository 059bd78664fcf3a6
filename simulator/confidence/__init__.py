"""How far off op times may be, and what that does to a run. Imports ``op_times`` and ``views``.

Read ``op_errors.py`` first: joint errors of op times.
"""
