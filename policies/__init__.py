"""Scheduling decisions, and nothing else: standard library only, no clock, no SimPy, no torch.

Read three files first: ``batch.py`` (what a decision is), ``policy.py`` (what a policy sees and
returns) and ``scheduler.py`` (the queues around it). The simulator and the real engine use the same
objects.
"""
