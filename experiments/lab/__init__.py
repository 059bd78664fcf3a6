"""The laboratory: what proves the product, which imports nothing of it. Read first: ``cli.py``, its
commands; then the first file of a room, named in its ``__init__``."""
