"""The first hour on a GPU: ``sarathi-sim first-light``. Steps in an order, each a process of its
own with a hard limit, a ledger, and one archive of everything. Imports ``measuring`` and
``kernels``.

Read ``steps.py`` first, then ``hour.py``: the loop over them.
"""
