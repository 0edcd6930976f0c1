"""Megatron-Core on a machine without a GPU.

Megatron-Core expects `torch.cuda`. On a CPU, its modules get a view of torch in which every
spelling of "the accelerator" means the CPU; the rest of the process keeps the real torch. The view
replaces names, never arithmetic: Megatron computes the same as on a GPU.
"""

import contextlib
import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vapo_megatron.megatron.platform import current_platform

_CPU = torch.device("cpu")
_MEGATRON = "megatron.core"
_TENSOR_FACTORIES = (
    "tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "as_tensor",
    "linspace",
    "eye",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_strided",
)
# Modules that Megatron imports late; they have to be there before the view is installed.
_LATE_MODULES = (
    "tensor_parallel",
    "parallel_state",
    "hyper_comm_grid",
    "pipeline_parallel.schedules",
    "distributed",
    "pipeline_parallel.p2p_communication",
    "optimizer",
    "optimizer.distrib_optimizer",
    "optimizer.clip_grads",
    "optimizer_param_scheduler",
    "dist_checkpointing",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.fully_parallel",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "transformer.attention",
)


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _Event:
    """An event or stream on a device that does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return event or _Event()


def _to_cpu(device: Any) -> Any:
    if device is None:
        return None
    if isinstance(device, int):
        return _CPU
    return _CPU if torch.device(device).type == "cuda" else device


def _cuda_on_cpu() -> types.ModuleType:
    module = types.ModuleType("torch.cuda (CPU)")
    module.__dict__.update(torch.cuda.__dict__)
    stream = _Event()
    no_context = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
    module.__dict__.update(
        current_device=lambda: _CPU,
        device_count=lambda: 1,
        set_device=_nothing,
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        stream=no_context,
        Stream=lambda *_, **__: stream,
        Event=_Event,
        device=no_context,
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        nvtx=types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=no_context),
        **dict.fromkeys(("synchronize", "empty_cache"), _nothing),
    )
    return module


def _factory_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


class _DeviceType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)


class _Device(metaclass=_DeviceType):
    """torch.device, for which 'cuda' is the CPU."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str) and args[0].startswith("cuda"):
            return _CPU
        return torch.device(*args, **kwargs)


@functools.cache
def _torch_view() -> types.ModuleType:
    view = types.ModuleType("torch (CPU view for megatron.core)")
    view.__dict__.update(torch.__dict__)
    changes: dict[str, Any] = {
        name: _factory_on_cpu(getattr(torch, name)) for name in _TENSOR_FACTORIES
    }
    changes["cuda"] = _cuda_on_cpu()
    changes["device"] = _Device
    changes["autocast"] = lambda device_type="cpu", **kwargs: torch.autocast(
        "cpu" if device_type == "cuda" else device_type, **kwargs
    )
    view.__dict__.update(changes)
    return view


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """Tensor.type() gives a CPU tensor the name by which Megatron's optimizers know a CUDA one."""
    original = torch.Tensor.type

    def cuda_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda"):
            return result.replace("torch.", "torch.cuda.")
        return result

    torch.Tensor.type = cuda_name  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "__wrapped__"):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return call


def _without_compilation(owner: types.ModuleType | type) -> None:
    """Put Megatron's own functions back where it has given them to torch.compile, which needs a C++
    compiler on a CPU, and minutes. Modules imported after `disable_jit_fuser` have none such."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, type) and isinstance(owner, types.ModuleType):
            if str(value.__module__).startswith(_MEGATRON):
                _without_compilation(value)
        elif isinstance(value, types.FunctionType):
            original = getattr(value, "_torchdynamo_orig_callable", None)
            if original is not None and original.__module__.startswith(_MEGATRON):
                setattr(owner, name, original)


def import_megatron() -> None:
    """Import Megatron-Core, before any module that needs it: in three quarters of the time, because
    nothing loads PyTorch's compiler, which its decorators would, or W&B, which its inference logs
    to. Does nothing if CUDA works."""
    if current_platform().is_cuda or _MEGATRON in sys.modules:
        return
    absent = {} if "wandb" in sys.modules else {"wandb": None}
    compiler = torch.compile
    sys.modules.update(absent)  # type: ignore[arg-type]
    torch.compile = _unchanged  # type: ignore[assignment]
    try:
        jit = importlib.import_module(f"{_MEGATRON}.jit")
    finally:
        torch.compile = compiler
        for name in absent:
            del sys.modules[name]
    jit.disable_jit_fuser()


def _unchanged(function: Any = None, **_: Any) -> Any:
    """As torch.compile is called, with a function or as a decorator with options."""
    if function is None:
        return _unchanged
    return function


@functools.cache
def _patch_once() -> None:
    import megatron.core.jit as jit

    jit.disable_jit_fuser()
    for name in _LATE_MODULES:
        importlib.import_module("megatron.core." + name)
    for name, module in list(sys.modules.items()):
        if name.startswith(_MEGATRON):
            _without_compilation(module)
    # On a machine without CUDA these two can do nothing but raise.
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # It warns that the CPU's generator moved while the GPU's was in use: here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    import megatron.core.optimizer.distrib_optimizer as distributed
    import megatron.core.optimizer.optimizer as plain

    optimizer: Any = distributed.DistributedOptimizer
    optimizer.__init__ = _with_cuda_type_names(optimizer.__init__)
    plain.clip_grad_by_total_norm_fp32 = _with_cuda_type_names(plain.clip_grad_by_total_norm_fp32)


def install() -> None:
    """Give the CPU view to every loaded module of megatron.core. Does nothing if CUDA works; may be
    called again."""
    if current_platform().is_cuda:
        return
    _patch_once()
    view = _torch_view()
    for name, module in list(sys.modules.items()):
        if not name.startswith(_MEGATRON):
            continue
        if getattr(module, "torch", None) is torch:
            module.torch = view  # type: ignore[attr-defined]
        for mark in ("range_push", "range_pop"):
            if getattr(getattr(module, mark, None), "__module__", "") == "torch.cuda.nvtx":
                setattr(module, mark, _nothing)
