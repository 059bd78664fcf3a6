"""``python -m experiments`` is ``sarathi-sim``."""

from experiments.cli.app import main

main()
