"""The config of `vapo-megatron plan` and `vapo-megatron doctor`: a training config with two more
sections."""

from typing import Literal

from pydantic import Field

from vapo_megatron.config.base import Section
from vapo_megatron.config.train import TrainConfig

Kind = Literal["a100-40g", "a100-80g", "h100-80g", "h200-141g", "b200-180g"]


class EfficiencyConfig(Section):
    """Shares of nominal rates that a run achieves: assumed, or measured on one H200 (docs/gpu.md)
    where it says so."""

    linear: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of the dense bf16 rate that matrix products achieve; measured: 0.44 "
        "(1.5B) to 0.58 (7B)",
    )
    attention: float = Field(
        0.35, gt=0, le=1, description="the same for core attention, forward and backward"
    )
    experts: float = Field(
        0.2,
        gt=0,
        le=1,
        description="the same for expert MLPs; NVIDIA's performance summary of Megatron Bridge "
        "states 0.12 to 0.24 "
        "(H100) and 0.17 to 0.31 (GB200) for whole pretraining steps of mixture-of-experts models",
    )
    fp8_gain: float = Field(
        1.25,
        ge=1,
        le=2,
        description="speed of the linear layers in FP8, relative to bf16; measured: 1.19 to 1.33",
    )
    memory: float = Field(
        0.7, gt=0, le=1, description="share of memory bandwidth that decoding and updates achieve"
    )
    nvlink: float = Field(
        0.7, gt=0, le=1, description="share of NVLink bandwidth that collectives achieve"
    )
    network: float = Field(
        0.7, gt=0, le=1, description="share of network bandwidth that collectives achieve"
    )
    pcie: float = Field(
        0.6, gt=0, le=1, description="share of PCIe bandwidth that host-device copies achieve"
    )
    decode_overhead: float = Field(
        0.001,
        ge=0,
        description="seconds per decoding step beyond memory traffic and matrix products; measured",
    )
    request_overhead: float = Field(
        5e-6,
        ge=0,
        description="seconds per decoding step to add for each running response; measured",
    )


class HardwareConfig(Section):
    """The accelerators that `plan` plans for and that `doctor` measures against."""

    kind: Kind = Field(
        "h100-80g", description="GPU model, which sets all rates below that are not given"
    )
    gpus_per_node: int = Field(8, ge=1, description="GPUs per node, linked by NVLink")
    device_memory_gib: float | None = Field(
        None, gt=0, description="memory per GPU in GiB; default: by kind"
    )
    node_memory_gib: float = Field(
        2048.0, gt=0, description="host memory per node, GiB; 2 TiB in an 8-GPU HGX or DGX"
    )
    bf16_tflops: float | None = Field(
        None, gt=0, description="nominal dense bf16 rate per GPU, 10^12 operations per second"
    )
    memory_gbs: float | None = Field(
        None, gt=0, description="nominal memory bandwidth per GPU, 10^9 bytes per second"
    )
    nvlink_gbs: float | None = Field(
        None, gt=0, description="nominal NVLink GB/s per GPU, one direction"
    )
    network_gbs: float | None = Field(
        None,
        gt=0,
        description="network GB/s per GPU, one direction; 50 is one 400 Gb/s adapter per GPU",
    )
    pcie_gbs: float | None = Field(
        None, gt=0, description="nominal GB/s between host and GPU, one direction"
    )
    trainer_overhead_gib: float = Field(
        3.0,
        ge=0,
        description="GPU memory of a rank besides its tensors: CUDA context, NCCL, workspaces; "
        "assumed",
    )
    engine_overhead_gib: float = Field(
        2.5,
        ge=0,
        description="GPU memory of an offloaded engine: CUDA context, NCCL, captured graphs; "
        "assumed",
    )
    fragmentation: float = Field(
        0.05,
        ge=0,
        lt=0.5,
        description="share of GPU memory lost to allocator fragmentation; assumed",
    )
    rank_memory_gib: float = Field(
        6.0,
        ge=0,
        description="host memory of a rank and its engine besides tensors: libraries, pinned "
        "buffers; assumed",
    )
    efficiency: EfficiencyConfig = EfficiencyConfig()


class PlannedRunConfig(Section):
    """Inputs that `plan` cannot derive: the number of GPUs, mean lengths of prompts and
    responses."""

    gpus: int | None = Field(
        None, ge=1, description="GPUs of the run; none: cluster.ranks, else one node"
    )
    mean_prompt_tokens: int | None = Field(
        None, ge=1, description="mean tokens; none: half of data.max_prompt_tokens"
    )
    mean_response_tokens: int | None = Field(
        None,
        ge=1,
        description="mean tokens over the whole run; none: half of sampling.max_new_tokens",
    )
    informative_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of groups with both correct and incorrect responses, which dynamic "
        "sampling keeps; it falls "
        "as the policy learns",
    )
    turns: int = Field(1, ge=1, description="responses per episode, with rollout.agent")
    tool_seconds: float = Field(
        0.0,
        ge=0,
        description="seconds that an episode waits for a tool between turns; its engine slot is "
        "free then",
    )
    grade_seconds: float = Field(
        0.02,
        ge=0,
        description="seconds to grade one response on one of reward.workers, during generation",
    )


class PlanConfig(TrainConfig):
    """A training config with the hardware it is meant for and what a plan has to assume about the
    run.

    `train` refuses both sections: give them as overrides, or in a YAML file that `extends` the
    training config.
    """

    hardware: HardwareConfig = HardwareConfig()
    plan: PlannedRunConfig = PlannedRunConfig()
