"""Kernels of serving stacks: surfaces fitted to public tables, one file per device and stack.

Start with ``stack_times.py`` (the time of any op of a shard) and ``gemm_lattice.py`` (how a table
of GEMMs becomes a surface). Imports ``physics``.
"""
