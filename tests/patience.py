"""How long a test waits for another process before it gives up."""

#: Seconds. What works is done long before, also on a machine that does twenty other things.
PATIENCE_S = 600
