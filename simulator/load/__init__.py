"""The load: requests, traces, and what fits into the memory. Imports ``loop`` for the clock's
quanta.

Read ``workload.py`` first: how long requests are and when they arrive.
"""
