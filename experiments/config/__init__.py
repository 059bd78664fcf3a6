"""From YAML to checked scenarios, and from these to the simulator's inputs. Imports the simulator.

Read ``scenario.py`` first: every key of a configuration.
"""
