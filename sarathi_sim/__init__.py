"""Profile-driven simulation of LLM serving. As a library, ``import sarathi_sim as sim`` has the
names of docs/research/python.md; the module of each is imported when it is first used.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sarathi_sim.experiments.config.loading import Experiment as Experiment
    from sarathi_sim.experiments.library import capacity as capacity
    from sarathi_sim.experiments.library import check as check
    from sarathi_sim.experiments.library import compare as compare
    from sarathi_sim.experiments.library import list_ as list_
    from sarathi_sim.experiments.library import load as load
    from sarathi_sim.experiments.library import partial_answers as partial_answers
    from sarathi_sim.experiments.library import plan as plan
    from sarathi_sim.experiments.library import plot as plot
    from sarathi_sim.experiments.library import read as read
    from sarathi_sim.experiments.library import recommend as recommend
    from sarathi_sim.experiments.library import report as report
    from sarathi_sim.experiments.library import run as run
    from sarathi_sim.experiments.library import sweep as sweep
    from sarathi_sim.experiments.library import workload as workload
    from sarathi_sim.experiments.own_server import fit as fit
    from sarathi_sim.experiments.own_server import profile as profile
    from sarathi_sim.experiments.own_server import score as score
    from sarathi_sim.experiments.own_server import tune as tune
    from sarathi_sim.experiments.report.charts import plot_cdf as plot_cdf
    from sarathi_sim.experiments.report.charts import plot_completions as plot_completions
    from sarathi_sim.experiments.report.charts import plot_ledger as plot_ledger
    from sarathi_sim.experiments.report.charts import plot_timeline as plot_timeline
    from sarathi_sim.experiments.report.section import Result as Result
    from sarathi_sim.experiments.results import Tables as Tables
    from sarathi_sim.experiments.run.experiment import ExperimentResult as ExperimentResult
    from sarathi_sim.experiments.run.experiment import ScenarioRun as ScenarioRun
    from sarathi_sim.profiler.storage.strict import UserError as UserError

_HERE = Path(__file__).parent
if not (_HERE / "policies").is_dir():  # a checkout: the four folders stand beside this one
    __path__.append(str(_HERE.parent))

_NAMES = {
    "experiments.config.loading": "Experiment",
    "experiments.report.section": "Result",
    "experiments.library": (
        "capacity check compare list_ load partial_answers plan plot read recommend report run "
        "sweep workload"
    ),
    "experiments.own_server": "fit profile score tune",
    "experiments.results": "Tables",
    "experiments.run.experiment": "ExperimentResult ScenarioRun",
    "experiments.report.charts": "plot_cdf plot_completions plot_ledger plot_timeline",
    "profiler.storage.strict": "UserError",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_MOVED = {
    "advise": "recommend(..., policy='sarathi')",
    "describe_workload": "workload",
    "find_capacity": "capacity",
    "find_sensitivity": "capacity(..., sensitivity=True)",
    "sensitivity": "capacity(..., sensitivity=True)",
    "score_files": "score",
    "simulate": "run",
    "support": "list_('support')",
    "write_report": "report",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        now = f"; it is now sarathi_sim.{_MOVED[name]}" if name in _MOVED else ""
        raise AttributeError(f"module 'sarathi_sim' has no attribute {name!r}{now}")
    return getattr(import_module(f"sarathi_sim.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
