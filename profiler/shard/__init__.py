"""One tensor-parallel shard of a model in torch, with random weights; timed, and spread over
processes. Imports ``planning``.

Read ``layer.py`` first: one decoder layer as it is executed.
"""
