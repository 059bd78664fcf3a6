"""The inputs of a scenario, read and checked: its model, its device, its profile bundle.

They are kept for the next scenario, because a sweep names the same few in every run.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Literal

from experiments.config.errors import ConfigError
from experiments.config.loading import Source
from experiments.config.scenario import Scenario
from profiler.bundle.check import load_plausible
from profiler.bundle.schema import bundle_path, find_bundle
from profiler.facts.device import DeviceSpec, load_device
from profiler.facts.model import ModelSpec, load_model
from profiler.storage.paths import data_dir, user_path
from simulator.op_times.regression import OpTimes


def model_of(scenario: Scenario, source: Source) -> ModelSpec:
    """The model. Raises ConfigError where there is none of that name, or where TP cannot cut it."""
    try:
        path = user_path(scenario.model)
        model = _load_model(scenario.model, _changed(path) or _changed(path / "config.json"))
    except ConfigError as error:
        raise ConfigError(f"{source.name(('model',))}: {error}") from None
    try:
        model.check_tp(scenario.cluster.tp)
    except ValueError as error:
        raise source.error("cluster.tp", scenario.cluster.tp, str(error)) from None
    return model


def device_of(scenario: Scenario, source: Source) -> DeviceSpec:
    """The device. Raises ConfigError where it is unknown, or a node of it is too small for TP."""
    try:
        device = _load_device(scenario.device, _changed(user_path(scenario.device)))
    except ConfigError as error:
        raise ConfigError(f"{source.name(('device',))}: {error}") from None
    if scenario.cluster.tp > device.gpus_per_node:
        problem = f"must be at most {device.gpus_per_node}, the GPUs of a node of {device.name}"
        raise source.error("cluster.tp", scenario.cluster.tp, problem)
    return device


def _profiles(scenario: Scenario) -> Path:
    return user_path(scenario.profiles) if scenario.profiles else data_dir() / "profiles"


def dtype_bytes_of(scenario: Scenario, model: ModelSpec, device: DeviceSpec) -> int:
    """Bytes of a number in the profiled dtype; those of fp16 if there is no profile.

    A missing profile is reported later, after the check of the memory.
    """
    try:
        path = bundle_path(_profiles(scenario), device.name, model.name, scenario.cluster.tp)
        return _load(path, bundle_digest(path))[0].dtype_bytes if path.is_dir() else 2
    except ConfigError:
        return 2


def op_times_of(
    scenario: Scenario, model: ModelSpec, device: DeviceSpec, source: Source
) -> tuple[OpTimes, int, str]:
    """The op times, the longest context among them, and the digest of their bundle."""
    try:
        path = find_bundle(_profiles(scenario), device.name, model.name, scenario.cluster.tp)
        digest = bundle_digest(path)
        ops, longest = _load(path, digest)
    except ConfigError as error:
        raise ConfigError(f"{source.name(('profiles',))}: {error}") from None
    meta, tp = ops.bundle.meta, scenario.cluster.tp
    if (meta.device, meta.tp) != (device.name, tp):
        problem = (
            f"{path} holds the bundle of {meta.device} tp {meta.tp}, not {device.name} tp {tp}"
        )
        raise ConfigError(f"{source.name(('profiles',))}: {problem}")
    if ops.model != model:
        # A config.json may be called like a shipped model and describe another one.
        profiled, wanted = asdict(ops.model), asdict(model)
        differ = [f"{k} {profiled[k]}, not {wanted[k]}" for k in wanted if profiled[k] != wanted[k]]
        problem = f"{path} was made for another model of that name, with {'; '.join(differ)}"
        raise source.error("model", scenario.model, problem)
    if scenario.cluster.pp > 1 and link_scope(scenario, device) not in ops.send:
        problem = f"{path} holds no {link_scope(scenario, device)} transfers, so pp must be 1"
        raise source.error("cluster.pp", scenario.cluster.pp, problem)
    return ops, longest, digest


def link_scope(scenario: Scenario, device: DeviceSpec) -> Literal["intra_node", "inter_node"]:
    """Which link a pipeline's stages send over."""
    gpus = scenario.cluster.tp * scenario.cluster.pp
    return "intra_node" if gpus <= device.gpus_per_node else "inter_node"


def bundle_digest(path: Path) -> str:
    """SHA-256 of a bundle's ``meta.yaml``, which in turn holds that of its tables; empty without.

    Reading the bundle checks the latter.
    """
    meta = path / "meta.yaml"
    return sha256(meta.read_bytes()).hexdigest() if meta.is_file() else ""


def _changed(path: Path) -> int:
    """The time of a file's last change, for the caches below; 0 for a shipped name."""
    return path.stat().st_mtime_ns if path.is_file() else 0


@lru_cache(maxsize=8)
def _load_device(name: str, changed: int) -> DeviceSpec:
    """A device by name or path. Reading one takes 80 ms, and a sweep needs it for every run."""
    return load_device(name)


@lru_cache(maxsize=8)
def _load_model(name: str, changed: int) -> ModelSpec:
    return load_model(name)


@lru_cache(maxsize=8)
def _load(path: Path, digest: str) -> tuple[OpTimes, int]:
    """The regressions of one bundle, and its longest context; scenarios share them.

    ``digest`` is that of the bundle: a worker may outlive a change of the folder.
    """
    bundle = load_plausible(path)
    return OpTimes(bundle), int(bundle.attn_decode["context_tokens"].max())
