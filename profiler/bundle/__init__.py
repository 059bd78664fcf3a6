"""Profile bundles: the only door through which op times reach the simulator. Imports ``facts``.

Read ``schema.py`` first: what a bundle is, and how it is read.
"""
