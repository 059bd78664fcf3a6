"""Figures of a sweep's table.

Read ``plot.py`` first: which figures a sweep gets.
"""
