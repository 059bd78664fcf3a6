"""The load: requests, traces, and what fits into the memory. Imports ``loop`` for quanta.

Read ``requests.py`` first: the lengths of requests and their arrivals.
"""
