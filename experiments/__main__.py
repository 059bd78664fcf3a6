"""``python -m experiments`` is ``sarathi-sim``."""

from experiments.cli import main

main()
