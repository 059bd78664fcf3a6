"""Reports: finished results as one HTML file that opens without a network. Imports ``score``.

Read ``experiments/content.py`` first: what a report holds; then ``html_page.py``, which makes
the file.
"""
