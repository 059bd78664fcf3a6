"""Public measurement files as tidy frames, every used cell checked: one module a source.

Read ``measurements.py`` first: the form of the rows.
"""
