"""The source of op times: models, devices, profile bundles, device models, and the profiler.

Read three files first: ``facts/model.py`` (the sizes of a model), ``bundle/schema.py`` (what a
profile bundle is) and ``physics/shard_times.py`` (a bundle without a GPU). To measure one, read
``measuring/measure.py``. Only ``shard``, ``engine`` and ``measuring`` import torch.
"""
