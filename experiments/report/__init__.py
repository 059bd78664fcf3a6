"""Reports: finished results as one HTML file that opens without a network. Imports ``measured`` and
``capacity``.

Read ``experiments/content.py`` first: the content; then ``html_page.py``, which makes the file.
"""
