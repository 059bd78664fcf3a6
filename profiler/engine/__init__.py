"""A small serving engine in torch, driven by the same policies as the simulator. Imports ``shard``.

Read ``driver.py`` first: the serving loop around the scheduler.
"""
