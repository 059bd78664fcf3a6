"""Settings of all tests."""

from hypothesis import settings

# An example's time depends on the machine and on what else it does: it says nothing.
settings.register_profile("sarathi-sim", deadline=None)
settings.load_profile("sarathi-sim")
