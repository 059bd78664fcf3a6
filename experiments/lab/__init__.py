"""The laboratory: what proves the product, which imports nothing of it. Read first: the room's
first file, named in its ``__init__``."""
