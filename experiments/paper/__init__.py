"""The Sarathi paper: each of its numbers beside ours, its figures from our runs.

Start with ``data/paper/claims.yaml`` (what is stated), ``claims.py`` (how ours is judged) and
``quantities.py`` (how ours is computed); ``variants.py`` has the two sets of op times,
``gpt3.py`` section 5.3. ``docs/paper.md`` has the results.
"""
