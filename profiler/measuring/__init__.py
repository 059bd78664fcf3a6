"""The profiler: measures a shard's ops on this machine and writes a bundle. Imports ``shard``.

Read ``measure.py`` first: the command ``sarathi-sim profile``.
"""
