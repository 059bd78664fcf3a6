"""Fits of op times to public measurements, and their errors on rows left out. First: kernels.py."""
