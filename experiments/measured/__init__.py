"""Measurements beside simulations: score, replay, lockstep, validate, accuracy.

Readers: ``servers.py`` (tables of means: a row is a deployment, a load, and its measured means),
``recorded.py`` (the times of every request), ``torch_session.py`` and ``vllm_session.py`` (engines
that are run here; ``session.py`` has the order of runs). Comparisons: ``scoring.py`` of tables,
``comparison.py`` and ``validation.py`` of engines. ``answers.py`` makes the answer of each.
"""
