"""The Sarathi paper as code: each of its numbers beside ours, its figures from our runs.

Start with ``claims.py`` (what a claim is, and the registry), ``variants.py`` (the two sets of op
times) and ``costs.py`` (the simplest of the sections). ``docs/paper.md`` has the results.
"""
