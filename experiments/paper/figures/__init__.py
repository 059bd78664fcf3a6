"""The paper's figures and tables, redrawn from our runs.

Read ``gallery.py`` first: every figure and table, by name.
"""
