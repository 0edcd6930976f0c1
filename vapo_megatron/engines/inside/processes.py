"""The functions that SGLang runs in the child processes of a server.

They are pickled by name: a spawned child imports this module, and with it the CPU shim, before it
uses SGLang.
"""

import gc
import os
import signal
import tempfile
import uuid
from types import SimpleNamespace
from typing import Any

import setproctitle
import torch
import torch.nn.functional as F
from torch import Tensor

from vapo_megatron.engines.inside import cpu_shim

_on_cpu = cpu_shim.install()  # before SGLang, which imports what a CPU machine lacks

from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.distributed.device_communicators import shm_broadcast  # noqa: E402
from sglang.srt.managers import load_snapshot  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler, get_serving, run_scheduler_process  # noqa: E402
from sglang.srt.utils.common import kill_itself_when_parent_died  # noqa: E402
from sglang.srt.utils.weight_versions import WeightVersionEvent  # noqa: E402

from vapo_megatron.engines.inside.heartbeat import beats_with, register  # noqa: E402
from vapo_megatron.engines.inside.strict_updates import install_strict_loading  # noqa: E402
from vapo_megatron.weights.fp8 import BLOCK, FP8, LARGEST, dequantize  # noqa: E402


def install_cpu_fp8() -> None:
    """Let SGLang's layers in block FP8 (experts as well) and ModelOpt FP8 run on a CPU."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8LinearMethod

    for method in (Fp8LinearMethod, Fp8MoEMethod, ModelOptFp8LinearMethod):
        method.process_weights_after_loading = _leave_as_loaded
    Fp8MoEMethod.create_moe_runner = _no_runner
    Fp8MoEMethod.apply = _apply_experts
    Fp8LinearMethod.apply = _apply_block
    ModelOptFp8LinearMethod.apply = _apply_modelopt


def _leave_as_loaded(self: Any, layer: torch.nn.Module) -> None:
    """Kernels need other layouts; without kernels the parameters stay as in the checkpoint and can
    be loaded again."""


def _apply_block(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = dequantize(layer.weight, layer.weight_scale_inv).to(x.dtype)
    return F.linear(_rounded_in_groups(x), weight, bias)


def _no_runner(self: Any, layer: torch.nn.Module, moe_runner_config: Any) -> None:
    """There are no kernels to choose from."""


def _apply_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states

    def spread(values: Tensor, scales: Tensor) -> Tensor:
        return torch.stack([dequantize(*expert) for expert in zip(values, scales, strict=True)]).to(
            x.dtype
        )

    experts = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=spread(layer.w13_weight, layer.w13_weight_scale_inv),
        w2_weight=spread(layer.w2_weight, layer.w2_weight_scale_inv),
    )
    output = moe_forward_native(
        experts, _rounded_in_groups(x), dispatch_output.topk_output, layer.moe_runner_config
    )
    return StandardCombineInput(hidden_states=output)


def _rounded_in_groups(x: Tensor) -> Tensor:
    groups = F.pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return ((groups / scales).to(FP8).float() * scales).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def _apply_modelopt(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight_scale and input_scale have one number for each of the layers that are stacked in the
    weight."""
    widths = torch.tensor(layer.logical_widths)
    weight = layer.weight.float() * layer.weight_scale.repeat_interleave(widths)[:, None]
    scale = layer.input_scale.max()
    rounded = (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8).float() * scale
    return F.linear(rounded.to(x.dtype), weight.to(x.dtype), bias)


def keep_versions_apart(scheduler: Any) -> None:
    """Keep apart what different weight versions have cached and computed, in SGLang's scheduler
    class.

    A weight sync in place keeps the cache. A request that is still waiting would then read what the
    old weights made of its prompt for an earlier request, and be marked with the new version. So
    would tokens that the overlapped scheduler has computed under the old weights and not recorded
    yet.
    """
    add = scheduler._add_request_to_queue
    record = scheduler.record_weight_version_change

    def add_request(self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        req.extra_key = get_serving().weight_version
        add(self, req, *args, **kwargs)

    def record_change(self: Any, new_version: str | None) -> None:
        old_version = get_serving().weight_version
        record(self, new_version)
        if get_serving().weight_version == old_version:
            return
        for req in self.waiting_queue:
            req.extra_key = get_serving().weight_version
        for batch, _ in getattr(self, "result_queue", ()):
            for req in batch.reqs:
                # As in process_batch_result_prefill: the requests that get a token.
                if not req.finished() and not req.is_retracted and req.inflight_middle_chunks <= 0:
                    event = WeightVersionEvent(
                        old_version=old_version, num_output_tokens=len(req.output_ids) + 1
                    )
                    req.weight_version_events.append(event)

    scheduler._add_request_to_queue = add_request
    scheduler.record_weight_version_change = record_change


# Servers are killed, so a file in /dev/shm would stay; the folder of temporary files is removed
# with the server.
load_snapshot.shm_path_for = lambda instance: f"{tempfile.gettempdir()}/loads_{instance}.shm"
# Shared memory needs a name in /dev/shm. It contains the server's process group, by which it is
# found and removed (owner_guard.remove_shared_memory).
shm_broadcast.make_shm_name = parallel_state.make_shm_name = lambda kind: (
    f"sgl_shm_{kind}_{os.getpgrp()}_{uuid.uuid4().hex[:8]}"
)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler with strict weight updates, heartbeats and versions kept apart."""
    beats_with(Scheduler, register("scheduler"))
    keep_versions_apart(Scheduler)
    install_strict_loading()
    if _on_cpu:
        install_cpu_fp8()
        cpu_shim.share_experts()
    run = Scheduler.run_event_loop

    def run_frozen(scheduler: Any) -> None:
        # Else each full collection walks through all modules: a fifth of the time of a small
        # model's tokens. Not earlier: SGLang unfreezes where it has captured its CUDA graphs.
        gc.freeze()
        print(
            f"{gc.get_freeze_count()} objects are frozen; garbage collection: {gc.isenabled()}",
            flush=True,
        )
        run(scheduler)

    Scheduler.run_event_loop = run_frozen
    run_scheduler_process(*args, **kwargs)


def run_idle_detokenizer(*_: Any, **__: Any) -> None:
    """Takes the place of SGLang's detokenizer, to which a server without a tokenizer sends
    nothing."""
    setproctitle.setproctitle("sglang::detokenizer")
    kill_itself_when_parent_died()
    register("detokenizer")
    while True:
        signal.pause()
