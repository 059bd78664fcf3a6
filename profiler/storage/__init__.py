"""Files and folders: written completely or not at all, marked as ours, locked, read safely. Imports
no other room.

Read ``manifest.py`` first: we replace only the files that a manifest of ours names.
"""
