"""A pretended GPU: torch's fake tensors on ``cuda:0``, with stand-ins for what needs a driver.

Shapes, dtypes, devices and Python signatures are those of the real torch (and xformers, and NVML by
the names that are asked for); no number is computed. Times are the host's. Use it as::

    with fake_cuda.pretend() as gpu:
        ...  # torch.cuda.is_available() is true here

or run a command line on it: ``python -m tests.profiler_torch.fake_cuda profile --device cuda ...``
with the options of :func:`pretend` as JSON in the variable ``FAKE_CUDA``.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import bias

from sarathi_sim.profiler.shard import timing

_TOTAL_BYTES = 85e9


@dataclass
class Gpu:
    """What the pretended GPU was asked for, and what it shall fail.

    ``fail_at`` holds the exception of the n-th synchronization (from 1). ``calls`` counts those.
    After a ``torch.AcceleratorError`` every later synchronization fails as well. The first ``late``
    questions whether it has come to an event are answered with yes.
    """

    fail_at: dict[int, BaseException] = field(default_factory=dict)
    calls: int = 0
    broken: BaseException | None = None
    call_ms: float = 0.05
    late: int = 0
    log: list[str] = field(default_factory=list)
    nvml: Any = None

    def synchronize(self, *_: Any) -> None:
        self.calls += 1
        self.log.append("wait")
        error = self.fail_at.get(self.calls, self.broken)
        if error is not None:
            if isinstance(error, torch.AcceleratorError):
                self.broken = error
            raise error


#: Messages as torch 2.13 raises them, by what a test calls them.
FAILURES: dict[str, BaseException] = {
    "out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
    "refused": NotImplementedError("No operator found for `memory_efficient_attention_forward`"),
    "sticky": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
}


@contextmanager
def pretend(
    name: str = "NVIDIA H100 80GB HBM3",
    count: int = 1,
    capability: tuple[int, int] = (9, 0),
    free_bytes: float = 79e9,
    fail_at: dict[int, str] | None = None,
    flash: bool = True,
) -> Iterator[Gpu]:
    """A machine with ``count`` GPUs inside; ``fail_at`` names one of FAILURES by synchronization.

    ``flash``: whether SDPA says that it may use another kernel than math.
    """
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined, unused-ignore]
    gpu = Gpu({int(at): FAILURES[what] for at, what in (fail_at or {}).items()})
    properties = SimpleNamespace(
        multi_processor_count=132, total_memory=int(_TOTAL_BYTES), L2_cache_size=50 * 2**20,
        major=capability[0], minor=capability[1], name=name,
    )  # fmt: skip
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "get_device_capability": lambda *_, **__: capability,
        "get_device_name": lambda *_, **__: name,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": gpu.synchronize,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (int(free_bytes), int(_TOTAL_BYTES)),
        "get_device_properties": lambda *_, **__: properties,
        "_lazy_init": lambda: None,
        "_sleep": lambda cycles: gpu.log.append("sleep"),
        "Event": lambda enable_timing=False: _Event(gpu),
        "Stream": _Stream,
        "current_stream": lambda *_: _Stream(),
        "stream": lambda *_: nullcontext(),
        "graph": lambda *_, **__: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: gpu.log.append("replay")),
    }
    fakes = {
        "__getitem__": _getitem,
        "__setitem__": _setitem,
        "to": _to,
        "copy_": lambda self, *_, **__: self,
        "index_copy_": lambda self, *_: self,
        "tolist": lambda self: np.ones(self.shape, int).tolist(),  # torch.ones would be fake, too
    }
    with ExitStack() as stack:
        for owner, patches in ((torch.cuda, cuda), (torch, _functions()), (FakeTensor, fakes)):
            for key, value in patches.items():
                stack.enter_context(mock.patch.object(owner, key, value))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(timing, "_WAKING_S", 0.0))
        stack.enter_context(
            mock.patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
        )
        # Not mock.patch.dict, which would forget what else is imported meanwhile.
        stack.callback(_set_module, "pynvml", sys.modules.get("pynvml"))
        gpu.nvml = _nvml(name)
        _set_module("pynvml", gpu.nvml)
        stack.enter_context(mock.patch.object(bias, "causal_lower_right", _LowerRight))
        _xformers(stack)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield gpu


_for_good = ExitStack()  # never closed


@contextmanager
def no_numbers() -> Iterator[None]:
    """What asks the pretended GPU for one gets next to none; a mask is only a shape."""
    answers = {
        "item": lambda self: 1e-9,
        "__float__": lambda self: 1e-9,
        "triu": lambda self, *_: self,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, answer))
        yield


def pretend_for_good() -> None:
    """As :func:`fake_cuda.pretend` with :func:`no_numbers`, until the process ends."""
    _for_good.enter_context(pretend())
    _for_good.enter_context(no_numbers())
    _for_good.enter_context(mock.patch.object(torch.cuda, "_sleep", lambda cycles: None))


class _Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def record(self, *_: Any) -> None:
        self._gpu.log.append("record")

    def elapsed_time(self, end: _Event) -> float:
        return self._gpu.call_ms

    def query(self) -> bool:
        late, self._gpu.late = self._gpu.late, max(0, self._gpu.late - 1)
        return late > 0

    def synchronize(self) -> None:
        self._gpu.synchronize()


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _LowerRight:
    """torch's CausalBias, which no fake tensor can be."""

    def __init__(self, queries: int, keys: int) -> None:
        self.sizes = (queries, keys)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is F.scaled_dot_product_attention
        q, k, v = args
        assert (q.shape[2], k.shape[2]) == kwargs["attn_mask"].sizes and k.shape == v.shape
        return torch.empty_like(q)


class _Generator:
    def __init__(self, device: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> _Generator:
        return self


def _functions() -> dict[str, Any]:
    """Makers of tensors: those that would draw or copy numbers make empty ones of the shape."""
    randn, randint, tensor, from_numpy = (
        torch.randn, torch.randint, torch.tensor, torch.from_numpy,
    )  # fmt: skip

    def tensor_of(data: Any, device: Any = None, dtype: Any = None, **_: Any) -> torch.Tensor:
        with unset_fake_temporarily():
            found = tensor(data, dtype=dtype)
        return torch.empty(found.shape, dtype=found.dtype, device=device or "cpu")

    def arange(*ends: float, device: Any = None, dtype: Any = None, **_: Any) -> torch.Tensor:
        first, end, step = (0, *ends, 1)[-3:] if len(ends) == 1 else (*ends, 1)[:3]
        if dtype is None:
            whole = all(isinstance(value, int) for value in ends)
            dtype = torch.int64 if whole else torch.float32
        return torch.empty(max(0, math.ceil((end - first) / step)), dtype=dtype, device=device)

    return {
        "Generator": _Generator,
        "randn": lambda *size, generator=None, **more: randn(*size, **more),
        "randint": lambda *size, generator=None, **more: randint(*size, **more),
        "tensor": tensor_of,
        "arange": arange,
        "compile": lambda function, **_: function,
        "from_numpy": lambda array: torch.empty(array.shape, dtype=from_numpy(array).dtype),
    }


def _to(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
    device, dtype = more.get("device"), more.get("dtype")
    for given in args:
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, (str, torch.device)):
            device = torch.device(given)
        elif isinstance(given, torch.Tensor):
            device, dtype = given.device, given.dtype
    if device is None and dtype is None:
        return self
    return torch.empty(self.shape, dtype=dtype or self.dtype, device=device or self.device)


def _view(tensor: Any, key: Any) -> tuple[Any, list[Any] | None]:
    """The view that slices and integers of ``key`` make, and the tensors among it."""
    aten: Any = torch.ops.aten
    key = key if isinstance(key, tuple) else (key,)
    gaps = [place for place, part in enumerate(key) if part is Ellipsis]
    if gaps:
        missing = tensor.dim() - sum(part is not None and part is not Ellipsis for part in key)
        key = key[: gaps[0]] + (slice(None),) * missing + key[gaps[0] + 1 :]
    dim, index, advanced = 0, [], False
    for part in key:
        if isinstance(part, slice):
            tensor = aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
            index.append(None)
            dim += 1
        elif part is None:
            tensor = aten.unsqueeze.default(tensor, dim)
            index.append(None)
            dim += 1
        elif isinstance(part, (torch.Tensor, list)):
            index.append(part if isinstance(part, torch.Tensor) else torch.tensor(part))
            advanced = True
            dim += 1
        else:
            tensor = aten.select.int(tensor, dim, int(part))
    return tensor, (index if advanced else None)


def _getitem(tensor: Any, key: Any) -> Any:
    found, advanced = _view(tensor, key)
    return found if advanced is None else torch.ops.aten.index.Tensor(found, advanced)


def _setitem(tensor: Any, key: Any, value: Any) -> None:
    found, advanced = _view(tensor, key)
    if advanced is not None:
        found = torch.ops.aten.index.Tensor(found, advanced)
    assert torch.broadcast_shapes(found.shape, value.shape) == found.shape
    assert found.device == value.device and found.dtype == value.dtype


def _set_module(name: str, module: ModuleType | None) -> None:
    if module is None:
        del sys.modules[name]
    else:
        sys.modules[name] = module


def _nvml(name: str) -> ModuleType:
    module = ModuleType("pynvml")
    module.__dict__.update(
        NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, NVML_FI_DEV_POWER_INSTANT=186,
        nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetHandleByIndex=lambda index: f"index {index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: f"uuid {uuid}",
        nvmlDeviceGetName=lambda gpu: name,
        nvmlDeviceGetClockInfo=lambda gpu, kind: 1000 * kind,
        nvmlDeviceGetTemperature=lambda gpu, kind: 41,
        nvmlDeviceGetMaxClockInfo=lambda gpu, kind: 1980,
        nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 700_000,
        nvmlDeviceGetPowerUsage=lambda gpu: 345_678,
        nvmlDeviceGetFieldValues=lambda gpu, fields: [
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=543_210)) for _ in fields
        ],
        nvmlDeviceGetCurrentClocksEventReasons=lambda gpu: 0,
    )  # fmt: skip
    return module


def _xformers(stack: ExitStack) -> None:
    """xformers' Python code runs; where its operators are not loaded, they make empty tensors."""
    try:
        from xformers.ops.fmha import attn_bias, common
    except ImportError:
        return
    stack.enter_context(mock.patch.object(common, "_built_with_cuda", True))
    stack.enter_context(
        mock.patch.object(
            attn_bias,
            "_to_device_tensor",
            lambda seq, dtype, device: torch.empty(len(seq), dtype=dtype, device="cuda"),
        )
    )


def main() -> None:
    from sarathi_sim.experiments.cli import main as command

    with pretend(**json.loads(os.environ.get("FAKE_CUDA", "{}"))):
        command()


if __name__ == "__main__":
    main()
