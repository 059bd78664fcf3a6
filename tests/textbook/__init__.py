"""The simulation as a textbook would write it, against which the fast path is checked and timed.

Read ``simulation.py`` first. ``tests/simulator/oracle.py`` and ``pools.py`` run both on small
systems; ``python -m tests.bench`` times both on large ones.
"""
