"""Where the errors of a bundle's ops come from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.simulator.confidence.bands import UNKNOWN
from sarathi_sim.simulator.confidence.op_errors import NORMAL_90, layer_error, op_errors
from sarathi_sim.simulator.op_times.iteration import WholeLayer
from sarathi_sim.simulator.op_times.regression import bundle_times
from tests.simulator.test_interaction import attention_bundle, layers
from tests.simulator.test_predictor import simple_bundle


def marked(**marks: str) -> Bundle:
    """``simple_bundle``, of a device that nothing was fitted for, with origins of its ops."""
    bundle = simple_bundle()
    return replace(bundle, meta=replace(bundle.meta, environment=dict(marks)))


def test_what_was_measured_has_its_own_error_alone() -> None:
    for error in op_errors(bundle_times(simple_bundle())).values():
        assert (error.common, error.local) == (0.0, 0.0)


@pytest.mark.parametrize("mark", ["interpolated", "modelled: from ffn_ln1", "scaled"])
def test_a_model_that_nothing_is_known_of_is_not_exact(mark: str) -> None:
    """No calibration of the device says how good it is, so the assumed error stands in."""
    found = op_errors(bundle_times(marked(preproj=mark)))
    guessed, measured = found["preproj"], found["postproj"]
    assert np.hypot(guessed.common, guessed.local) == pytest.approx(UNKNOWN / NORMAL_90)
    assert measured.local == 0.0
    at = np.array([[128.0]])
    assert guessed.sigmas(at) > measured.sigmas(at)


def test_whole_layers_are_off_by_their_noise() -> None:
    bundle, noise = attention_bundle(), 0.1
    true = WholeLayer(1.2, 0.0, 0.1, 0.3)
    noisy = replace(bundle, mixed=layers(bundle, true, noise))
    exact = replace(bundle, mixed=layers(bundle, true))
    assert layer_error(bundle_times(noisy)).local == pytest.approx(noise, rel=0.4)
    # The terms are drawn towards none by their prior, which is all that is left here.
    assert layer_error(bundle_times(exact)).local < 0.02
