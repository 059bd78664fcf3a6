"""The load: requests, traces, and what fits into the memory. Imports ``loop`` for quanta.

Read ``workload.py`` first: the lengths of requests and their arrivals.
"""
