"""Profile-driven simulation of LLM serving. As a library, ``import sarathi_sim as sim`` has the
names of ``experiments/api.py``, which is imported when one of them is first used
(docs/library.md).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sarathi_sim.experiments.api import (
        Experiment,
        ExperimentResult,
        ScenarioRun,
        Tables,
        UserError,
        advise,
        check,
        compare,
        describe_workload,
        find_capacity,
        find_sensitivity,
        load,
        plan,
        plot_cdf,
        plot_completions,
        plot_ledger,
        plot_timeline,
        read,
        recommend,
        score_files,
        simulate,
        support,
        sweep,
        tune,
        write_report,
    )

_HERE = Path(__file__).parent
if not (_HERE / "policies").is_dir():  # a checkout: the four folders stand beside this one
    __path__.append(str(_HERE.parent))

__all__ = [
    "Experiment",
    "ExperimentResult",
    "ScenarioRun",
    "Tables",
    "UserError",
    "advise",
    "check",
    "compare",
    "describe_workload",
    "find_capacity",
    "find_sensitivity",
    "load",
    "plan",
    "plot_cdf",
    "plot_completions",
    "plot_ledger",
    "plot_timeline",
    "read",
    "recommend",
    "score_files",
    "simulate",
    "support",
    "sweep",
    "tune",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sarathi_sim' has no attribute {name!r}")
    from sarathi_sim.experiments import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
