"""The event loop: schedulers, pipelines and clocks. Imports ``policies``.

Read ``replica.py`` first: the main loop.
"""
