"""Real engines beside the loop, and the first hour on a GPU.

Read ``first_light.py`` first.
"""
