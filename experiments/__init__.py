"""The top package: from YAML to results, figures and tables.

Read three files first: ``config/scenario.py`` (every key of a configuration), ``run/experiment.py``
(what a run does) and ``cli/app.py`` (the commands). ``api.py`` is the library.
"""
