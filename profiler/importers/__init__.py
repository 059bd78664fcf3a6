"""Public measurements as profile bundles: one module per source. Imports ``physics``.

Read ``assemble.py`` first: how parts become a bundle, and how gaps are filled. Then ``shapes.py``
(GEMM shapes that a source lacks) and ``vidur.py`` (a source).
"""
