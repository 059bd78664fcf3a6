"""Where op times come from: models, devices, profile bundles, and the calibration of device models.

Start with these three files: ``model.py`` (every op's shape), ``schema.py`` (what a profile bundle
is) and ``modelled.py`` (a bundle without the GPU); to measure one, ``measure.py``. torch lives in
this package and nowhere else, and none of these needs it to be imported.
"""
