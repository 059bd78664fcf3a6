"""One's own server beside its simulation: replay, score, tune. Read first: ``replay.py``.

``load_tools.py`` reads files of load tools, ``replay.py`` sets recorded runs beside simulated ones,
``score.py`` says how far they are off, ``tune.py`` fits a server's constants."""
