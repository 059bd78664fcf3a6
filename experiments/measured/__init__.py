"""What was measured beside what is simulated: score, replay, lockstep, validate, accuracy.

Readers: ``servers.py`` (tables of means: a row is a deployment, a load, and what was measured),
``recorded.py`` (the times of every request), ``torch_session.py`` and ``vllm_session.py`` (engines
that are run here; ``session.py`` says in which order). Comparisons: ``scoring.py`` of tables,
``comparison.py`` and ``validation.py`` of engines. ``answers.py`` makes the answer of each.
"""
