"""The profiler: measures a shard's ops on this machine and writes a bundle. Imports ``shard`` and,
for what is measured in a running engine, ``engine``.

Read ``measure.py`` first: what ``sarathi-sim profile`` does.
"""
