"""What a finished run amounts to: pure functions of its records. Imports ``loop`` and ``op_times``.

Read ``metrics.py`` first: per request, per iteration and in all.
"""
