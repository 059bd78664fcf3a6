"""The laboratory: what proves the product, and what no product module imports.

Read ``engines/first_light.py`` first.
"""
