"""Charts of the library on the user's own axes (docs/library.md): each draws what a figure of
``run`` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metrics import METRICS
from ..results import Tables
from ..run.experiment import ExperimentResult, ScenarioRun
from .charts import MOST_ROWS, cdf, completions, ledger, timelines
from .draw import draw_on
from .section import Chart
from .timeline import Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Shown = ExperimentResult | Mapping[str, Tables]


def plot_cdf(axes: Axes, shown: Shown, metric: str = "ttft_s") -> None:
    """Draw the distribution of a metric of requests (of all tokens for ``tbt_s``), a line per
    scenario."""
    known = [key for key, one in METRICS.items() if one.unit == "s" and one.statistics]
    if metric not in known or metric == "ledger_s":
        raise UserError(f"metric: value {metric!r}: one of {', '.join(known)}")
    draw_on(axes, cdf(metric, _tables(shown)))


def plot_completions(axes: Axes, shown: Shown) -> None:
    """Draw the requests completed over time, a line per scenario."""
    draw_on(axes, completions(_tables(shown)))


def plot_ledger(axes: Axes, shown: Shown, scenario: str) -> None:
    """Draw each stage's time by account, in percent of the run."""
    (chart,) = ledger({scenario: _tables(shown)[scenario]})
    _titled(axes, chart)


def plot_timeline(axes: Axes, run: ScenarioRun, start_s: float, length_s: float) -> None:
    """Draw the work of every stage from ``start_s`` on, for ``length_s`` seconds."""
    window = Window(start_s, length_s)
    policy = run.deployment.scenario.policy.name
    (chart,) = timelines({policy: run.analysis}, window, window, MOST_ROWS, [policy])
    _titled(axes, chart)


def _titled(axes: Axes, chart: Chart) -> None:
    draw_on(axes, chart)
    axes.set_title(chart.title, color=chart.colour)


def _tables(shown: Shown) -> Mapping[str, Tables]:
    return shown.tables if isinstance(shown, ExperimentResult) else shown
