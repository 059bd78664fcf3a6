"""Scheduling decisions, and nothing else: standard library only, no clock, no SimPy, no torch.

Start with these three files: ``batch.py`` (what a decision is made of), ``policy.py`` (what a
policy sees and returns) and ``scheduler.py`` (the queues around it). The simulator and the real
engine drive the very same objects.
"""
