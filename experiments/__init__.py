"""The composition root: YAML in, figures and tables out.

Start with these three files: ``config.py`` (what an experiment may say), ``run.py`` (what a run
does) and ``cli.py`` (the commands).
"""
