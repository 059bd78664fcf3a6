"""A real engine beside the simulator. Imports ``run`` and the profiler's engine.

Read ``session.py`` first: what runs, in which order.
"""
