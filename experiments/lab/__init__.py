"""The laboratory: what proves the product's numbers; nothing of the product imports it.

Read ``sources/measurements.py`` first: how public measurements are read.
"""
