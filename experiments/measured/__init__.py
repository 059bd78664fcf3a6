"""One's own server beside its simulation. ``load_tools.py`` reads files of tools, ``replay.py``
sets recorded runs beside simulated ones (read it first), ``score.py`` says how far they are off,
``tune.py`` fits a server's constants."""
