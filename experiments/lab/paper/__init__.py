"""The Sarathi paper: each of its numbers beside ours, and its figures from our runs.

Start with ``data/paper/claims.yaml`` and ``claims.py``; ``docs/lab/paper.md`` has the results.
"""
