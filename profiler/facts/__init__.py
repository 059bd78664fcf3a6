"""Facts about models and devices, and the physics that follows from them. Imports ``storage``.

Read ``model.py`` first: the sizes of a transformer, and the shape of each of its ops.
"""
