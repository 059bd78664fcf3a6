"""Device models: op times of any shape without a GPU, fitted to public measurements. Imports
``bundle`` and ``public``.

Read ``forms.py`` first: each family of ops, its physics and the constants to fit.
"""
