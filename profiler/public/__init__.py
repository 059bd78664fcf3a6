"""Public measurement files as tidy frames, with every used cell checked. Imports ``bundle``.

Read ``frames.py`` first: the files, and the form of their rows.
"""
