"""Measurements beside simulations: score, replay, lockstep, validate, accuracy.

Readers: ``servers.py`` (tables of means: a row is a deployment, a load, and its measured means),
``mlperf.py`` (tables of MLPerf's runs, their requests and scenarios),
``benchmarks.py`` (files of load tools), ``torch_session.py`` and ``vllm_session.py`` (engines that
are run here; ``session.py`` has the order of runs). Comparisons: ``recorded.py`` of the times of
every request, ``scoring.py`` of tables (``host_fit.py`` fits the host's constants,
``row_errors.py`` has errors by group), ``comparison.py`` and ``validation.py`` of engines.
``answers.py`` makes the answer of each.
"""
