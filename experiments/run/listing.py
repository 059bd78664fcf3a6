"""Lists of what ships with the package: models, devices, policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, get_args, get_origin

from sarathi_sim.profiler.facts.device import list_devices, load_device
from sarathi_sim.profiler.facts.model import list_models, load_model
from sarathi_sim.profiler.kernels.stack_file import stacks_on
from ..config.policy import POLICIES
from ..report.section import Result, Section, Table


def models() -> Result:
    """Every shipped model: its fields by name, and a row of the most asked."""
    specs = {name: load_model(name) for name in list_models()}
    counted = ("num_parameters", "active_parameters")
    content = {n: asdict(m) | {key: getattr(m, key) for key in counted} for n, m in specs.items()}
    columns: dict[str, Callable[[Any], str]] = {
        "10^9 parameters": lambda spec: f"{spec.num_parameters / 1e9:.2f}",
        "active": lambda spec: f"{spec.active_parameters / 1e9:.2f}",
        "weights": lambda spec: spec.moe_dtype or spec.dtype,
        "layers": lambda spec: str(spec.num_layers),
        "hidden": lambda spec: str(spec.hidden_size),
        "heads/KV": lambda spec: f"{spec.num_heads}/{spec.num_kv_heads}",
        "context": lambda spec: str(spec.max_position_embeddings),
        "KV KiB/token": lambda spec: f"{spec.kv_bytes_per_token() / 1024:.0f}",
    }
    return _listed("model", content, specs, columns)


def devices() -> Result:
    """Every shipped device: its data sheet, and where its op times come from."""
    specs = {name: load_device(name) for name in list_devices()}
    content = {
        name: asdict(replace(spec, fitted=None))
        | {"fitted": bool(spec.fitted), "stacks": stacks_on(name)}
        for name, spec in specs.items()
    }
    columns: dict[str, Callable[[Any], str]] = {
        "GB": lambda spec: f"{spec.memory_bytes / 1e9:.0f}",
        "peak TFLOP/s": lambda spec: f"{spec.peak_flops / 1e12:.0f}",
        "GB/s": lambda spec: f"{spec.memory_bandwidth / 1e9:.0f}",
        "GPUs per node": lambda spec: str(spec.gpus_per_node),
        "op times": lambda spec: ", ".join(
            way
            for way, there in {"calibrated": spec.fitted, "by stack": stacks_on(spec.name)}.items()
            if there
        ),
        "stacks": lambda spec: ", ".join(stacks_on(spec.name)) or "-",
    }
    return _listed("device", content, specs, columns)


def policies() -> Result:
    """Every scheduling policy, with the keys of its section and their defaults."""
    keys = {
        name: {key: one for key, one in policy.model_fields.items() if key != "name"}
        for name, policy in POLICIES.items()
    }
    about = {name: " ".join((policy.__doc__ or "").split()) for name, policy in POLICIES.items()}
    content = {
        name: {"about": about[name], "keys": {key: one.default for key, one in fields.items()}}
        for name, fields in keys.items()
    }
    columns: dict[str, Callable[[Any], str]] = {
        "keys and defaults": lambda name: (
            ", ".join(
                f"{key}={one.default}{_others(one.annotation, one.default)}"
                for key, one in keys[name].items()
            )
            or "-"
        ),
        "what it does": lambda name: about[name],
    }
    return _listed("name", content, {name: name for name in POLICIES}, columns)


def _listed(
    what: str,
    content: Mapping[str, Any],
    specs: Mapping[str, Any],
    columns: Mapping[str, Callable[[Any], str]],
) -> Result:
    rows = [(name, *(cell(spec) for cell in columns.values())) for name, spec in specs.items()]
    table = Table("", (what, *columns), rows, text=1 + len(columns))
    return Result(content, Section("list", what, "What ships?", "", [table]))


def _others(annotation: object, default: object) -> str:
    """The other values a key may have, where they can be listed."""
    if get_origin(annotation) is not Literal:
        return ""
    others = [str(value) for value in get_args(annotation) if value != default]
    return f" (or {', '.join(others)})" if others else ""
