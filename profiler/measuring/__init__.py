"""The profiler: measures a shard's ops on this machine and writes a bundle. Imports ``shard``, and
``engine`` for what is measured in a running engine.

Read ``measure.py`` first: the command ``sarathi-sim profile``.
"""
