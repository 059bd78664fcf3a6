"""From YAML to checked scenarios, and from those to what the simulator takes. Imports the
simulator.

Read ``scenario.py`` first: every key of a configuration.
"""
