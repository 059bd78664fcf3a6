"""The command line: thin commands, each importing what it needs when it runs. Imports every room.

Read ``app.py`` first.
"""
