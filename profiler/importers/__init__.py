"""Public measurements as profile bundles: one module a source.

Start with ``assemble.py`` (how parts become a bundle, and what fills the gaps), ``shapes.py`` (GEMM
shapes that a source lacks) and ``vidur.py`` (a source).
"""
