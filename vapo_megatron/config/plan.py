"""The config of `vapo-megatron plan` and `vapo-megatron doctor`: a training config and two sections of their own."""

from typing import Literal

from pydantic import Field

from vapo_megatron.config.base import Section
from vapo_megatron.config.train import TrainConfig

Kind = Literal["a100-40g", "a100-80g", "h100-80g", "h200-141g", "b200-180g"]


class EfficiencyConfig(Section):
    """Shares of stated rates that a run reaches. Assumptions until benchmarks/ has measured them on your machines."""

    linear: float = Field(
        0.45,
        gt=0,
        le=1,
        description="dense bf16 rate that matrix products reach; Megatron-LM's README states 0.41 to 0.48 for whole "
        "pretraining steps on H100",
    )
    attention: float = Field(0.35, gt=0, le=1, description="likewise, for core attention, forward and backward")
    experts: float = Field(
        0.2,
        gt=0,
        le=1,
        description="likewise, for the layers' MLPs where they are experts; NVIDIA's performance summary of Megatron "
        "Bridge states 0.12 to 0.24 (H100) and 0.17 to 0.31 (GB200) for whole pretraining steps of such models",
    )
    fp8_gain: float = Field(1.3, ge=1, le=2, description="speed of the linear layers in FP8, relative to bf16")
    memory: float = Field(0.7, gt=0, le=1, description="memory bandwidth that decoding and optimizer steps reach")
    nvlink: float = Field(0.7, gt=0, le=1, description="NVLink bandwidth, one direction, that collectives reach")
    network: float = Field(0.7, gt=0, le=1, description="network bandwidth of a GPU that collectives reach")
    pcie: float = Field(0.6, gt=0, le=1, description="PCIe bandwidth that copies between host and device reach")
    decode_overhead: float = Field(
        0.005, ge=0, description="seconds of a decoding step that are neither memory traffic nor products"
    )
    request_overhead: float = Field(
        8e-5,
        ge=0,
        description="likewise, for each running response: scheduling, its log-prob; fitted to published steps of dense "
        "models (docs/plan.md)",
    )


class HardwareConfig(Section):
    """The accelerators that `plan` plans for and that `doctor` measures against."""

    kind: Kind = Field("h100-80g", description="fills in the rates below that are not given")
    gpus_per_node: int = Field(8, ge=1, description="GPUs of a node; they are linked by NVLink")
    device_memory_gib: float | None = Field(None, gt=0, description="memory of a GPU; none: that of the kind")
    node_memory_gib: float = Field(2048.0, gt=0, description="memory of a node; an HGX or DGX of eight GPUs has 2 TiB")
    bf16_tflops: float | None = Field(
        None, gt=0, description="stated dense bf16 rate of a GPU, 10^12 operations per second"
    )
    memory_gbs: float | None = Field(None, gt=0, description="stated memory bandwidth of a GPU, 10^9 bytes per second")
    nvlink_gbs: float | None = Field(None, gt=0, description="stated NVLink bandwidth of a GPU, one direction")
    network_gbs: float | None = Field(
        None, gt=0, description="network bandwidth of a GPU, one direction: 50 is one 400 Gb/s adapter a GPU"
    )
    pcie_gbs: float | None = Field(None, gt=0, description="stated bandwidth between host and GPU, one direction")
    trainer_overhead_gib: float = Field(
        3.0, ge=0, description="GPU memory of a rank beside its tensors: CUDA context, NCCL, workspaces; an assumption"
    )
    engine_overhead_gib: float = Field(
        2.5, ge=0, description="GPU memory of an offloaded engine: CUDA context, NCCL, captured graphs; an assumption"
    )
    fragmentation: float = Field(
        0.05, ge=0, lt=0.5, description="share of GPU memory that the allocator cannot use; an assumption"
    )
    rank_memory_gib: float = Field(
        6.0,
        ge=0,
        description="node memory of a rank and its engine beside tensors: libraries, pinned buffers; an assumption",
    )
    efficiency: EfficiencyConfig = EfficiencyConfig()


class PlannedRunConfig(Section):
    """What `plan` cannot know: the number of GPUs, the mean lengths of prompts and responses."""

    gpus: int | None = Field(None, ge=1, description="GPUs of the run; none: cluster.ranks, else one node")
    mean_prompt_tokens: int | None = Field(None, ge=1, description="none: half of data.max_prompt_tokens")
    mean_response_tokens: int | None = Field(
        None, ge=1, description="over the whole run; none: half of sampling.max_new_tokens"
    )
    informative_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="groups with both correct and incorrect responses, which dynamic sampling keeps; it falls as the "
        "policy learns",
    )
    turns: int = Field(1, ge=1, description="responses of an episode, where rollout.agent is an agent")
    tool_seconds: float = Field(
        0.0, ge=0, description="an episode's wait for a tool between two turns; its place in an engine is free then"
    )
    grade_seconds: float = Field(
        0.02, ge=0, description="of one response on one of reward.workers, while others are generated"
    )


class PlanConfig(TrainConfig):
    """A training config, the accelerators it is meant for, and what a plan has to assume about the run.

    `train` refuses both sections: give them as overrides, or in a YAML that `extends` the training config.
    """

    hardware: HardwareConfig = HardwareConfig()
    plan: PlannedRunConfig = PlannedRunConfig()
