"""Reports: finished results as one HTML file that opens without a network. Imports ``measured`` and
``capacity``.

Read ``section.py`` first: an answer as data; then ``render.py``, which shows it.
"""
