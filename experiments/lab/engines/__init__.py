"""Real engines beside the simulator: our engine in torch, and logs of other engines' schedulers.

Read ``session.py`` first: what is run, and what is compared.
"""
