"""Files and folders: written whole or not at all, marked as ours, locked, read safely. Imports
nothing of ours.

Read ``manifest.py`` first: what we may replace is what a manifest of ours names.
"""
