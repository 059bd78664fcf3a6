"""The top package: from YAML to results, figures and tables.

Read three files first: ``config/scenario.py`` (every key of a configuration), ``run/experiment.py``
(what a run does) and ``library.py`` (the library, whose functions are the commands of ``cli.py``).
"""
