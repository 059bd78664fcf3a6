"""The source of the op times of a model's shard on a device, the same for every command."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ..bundle.schema import bundle_path, find_bundle
from ..facts.device import DeviceSpec, list_devices
from ..facts.formats import Kernels
from ..facts.model import ModelSpec
from ..facts.ops import MOE
from ..physics.shard_times import DeviceTimes, ShardTimes
from ..storage.files import data_dir
from ..storage.strict import SpecError
from .stack_file import load_stack, stacks_on
from .stack_times import StackTimes

_MXFP4, _MXFP4_FP8 = "w4a16_mxfp4", "w4a8_mxfp4_mxfp8"


def op_source(
    device: DeviceSpec,
    model: ModelSpec,
    tp: int,
    kernels: Kernels | None = None,
    profiles: Path | None = None,
) -> Path | ShardTimes:
    """The folder of the bundle, or the source of op times without one.

    With ``kernels`` it is a stack's tables. Without, a bundle under ``profiles`` (None: the shipped
    ones) has precedence over the calibrated device, which is not used if ``profiles`` are the
    user's own. Raises UserError for unmeasured kernels, ValueError for a tp that does not fit the
    model."""
    if kernels is not None and device.name not in list_devices():
        raise SpecError(
            f"no kernels of stack {kernels.stack} were fitted on {device.name}, a device of yours; "
            "take the closest shipped one (engine.op_scale multiplies its op times), or profile it"
        )
    if kernels is not None:
        return _stack_times(device.name, kernels, model, tp)
    root = data_dir() / "profiles" if profiles is None else profiles
    path = bundle_path(root, device.name, model.name, tp)
    if (path / "meta.yaml").is_file():
        return path
    if profiles is None and device.name in list_devices():
        return DeviceTimes(device.name, model, tp)
    return find_bundle(root, device.name, model.name, tp)


@lru_cache(maxsize=64)  # of hundreds of deployments few differ in it
def _stack_times(device: str, kernels: Kernels, model: ModelSpec, tp: int) -> StackTimes:
    return StackTimes(device, kernels, model, tp)


def served_formats(model: ModelSpec, device: str | None, stack: str | None) -> dict[str, str]:
    """The number formats (not bf16) that a stack computes a checkpoint in. MXFP4 leaves the
    activations open. Where the stack was measured with them in fp8 (Blackwell), it serves such
    experts so (as gpt-oss in the launch scripts of InferenceX)."""
    found = model.formats
    if found.get("moe_dtype") != _MXFP4 or not (device and stack and stack in stacks_on(device)):
        return found
    measured = load_stack(device, stack)[0].having(f"{MOE}.{_MXFP4_FP8}")
    return found | ({"moe_dtype": _MXFP4_FP8} if measured else {})
