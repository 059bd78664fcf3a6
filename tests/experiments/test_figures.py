"""Figures of few and of many scenarios."""

from __future__ import annotations

import numpy as np
import pandas as pd

from experiments.figures import bubble_cdf, completions


def _requests(count: int, bubble_s: float) -> pd.DataFrame:
    return pd.DataFrame(
        {"bubble_s": np.full(count, bubble_s), "finish_s": np.linspace(0.1, 0.31234, count)}
    )


def test_counts_of_requests_are_whole() -> None:
    axes = completions({"orca": _requests(3, 1.0)}).axes[0]
    assert all(tick == round(tick) for tick in axes.get_yticks())
    assert axes.lines[0].get_label() == "orca: all after 0.312 s"


def test_no_bubbles_are_said_in_words() -> None:
    axes = bubble_cdf({"orca": _requests(3, 0.0)}).axes[0]
    assert [text.get_text() for text in axes.texts] == ["No request met a bubble."]
    assert not bubble_cdf({"orca": _requests(3, 1.0)}).axes[0].texts


def test_a_long_legend_lies_outside() -> None:
    for count, outside in ((6, False), (7, True)):
        figure = bubble_cdf({f"run_{i}": _requests(3, 1.0 + i) for i in range(count)})
        assert bool(figure.legends) == outside
        assert (figure.axes[0].get_legend() is None) == outside
