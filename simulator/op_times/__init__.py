"""From a bundle to the time of any batch. Imports ``loop`` (for quanta and records) and the
profiler's bundles.

Read ``predictor.py`` first: the time of a batch.
"""
