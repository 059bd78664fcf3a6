"""The top package: from YAML to results, figures and tables.

Read three files first: ``config/scenario.py`` (every key of a configuration), ``run/experiment.py``
(what a run does) and ``cli/app.py`` (the commands). As a library, ``import experiments as sim`` has
the names of ``api.py``, which is imported when one of them is first used (docs/library.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.api import (
        ConfigError,
        Experiment,
        ExperimentResult,
        ScenarioRun,
        Tables,
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
        write_report,
    )

__all__ = [
    "ConfigError",
    "Experiment",
    "ExperimentResult",
    "ScenarioRun",
    "Tables",
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
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'experiments' has no attribute {name!r}")
    from experiments import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
