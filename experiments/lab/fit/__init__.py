"""What is made of public measurements: profile bundles, and fitted laws.

Read ``bundles.py`` first: from rows to op times.
"""
