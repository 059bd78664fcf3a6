"""Profile bundles: all op times reach the simulator through them. Imports ``facts``.

Read ``schema.py`` first: what a bundle is, and how it is read.
"""
