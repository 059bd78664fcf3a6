"""A real engine beside the simulator. Imports ``run`` and the profiler's engine.

Read ``session.py`` first: what is run, in which order.
"""
