"""Public measurement files as tidy frames, every cell that is used checked. Imports ``facts``.

Read ``frames.py`` first: which files there are, and what their rows become.
"""
