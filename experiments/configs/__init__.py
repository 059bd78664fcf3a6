"""Experiment configurations that ship with the package."""
