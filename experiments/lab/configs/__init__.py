"""Configurations of the laboratory's commands."""
