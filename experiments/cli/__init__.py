"""The command line: thin commands that import what they need when they run. Imports every room.

Read ``app.py`` first.
"""
