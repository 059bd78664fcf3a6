"""The process of one step: ``python -m sarathi_sim.profiler.first_light.one_step``. Imports torch.

Its arguments are the parent's process id, the step, and the three fields of a Task. It writes the
step's result, and exits with 1 where there is an ``error`` in it.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.first_light.machine_steps import ceilings, correctness, methods, probe
from sarathi_sim.profiler.first_light.model_steps import PROFILES, profile_one, tables, validate
from sarathi_sim.profiler.first_light.steps import PROBE, Found, Task
from sarathi_sim.profiler.planning.journal import ProfileError
from sarathi_sim.profiler.storage.child import end_with
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.profiler.storage.strict import UserError

WORKS: dict[str, Callable[[Task], Found]] = {
    PROBE: probe, "correctness": correctness, "ceilings": ceilings, "methods": methods,
    "tables": tables, "validate": validate,
    **{name: partial(profile_one, name) for name in PROFILES},
}  # fmt: skip
"""The function of each step."""


def main() -> int:
    """Do the step; 0 if it is done."""
    parent, step, folder, seconds, rehearsal = sys.argv[1:]
    end_with(int(parent))
    task = Task(Path(folder), float(seconds), rehearsal == "1")
    content: dict[str, Any]
    try:
        content = asdict(WORKS[step](task))
    except (ProfileError, UserError) as error:
        content = {"error": " ".join(str(error).split())}
    except Exception as error:
        traceback.print_exc()
        said = " ".join(str(error).split())[:300]
        content = {"error": f"{type(error).__name__}: {said}"}
    print(content.get("headline") or content["error"])  # noqa: T201
    write_whole(task.result(step), json.dumps(content, indent=1, default=str) + "\n")
    return int("error" in content)


if __name__ == "__main__":
    sys.exit(main())
