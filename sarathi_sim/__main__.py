"""``python -m sarathi_sim`` is ``sarathi-sim``."""

from sarathi_sim.experiments.cli import main

main()
