"""The errors of op times, and their effect on a run. Imports ``op_times`` and ``views``.

Read ``op_errors.py`` first: joint errors of op times.
"""
