"""What a plan takes for granted, in words, each with the key that changes it."""

from pathlib import Path

from vapo_megatron.operations.hardware import GIB
from vapo_megatron.operations.plan.activations import EXPERT_IMBALANCE
from vapo_megatron.operations.plan.model_files import model_directory
from vapo_megatron.operations.plan.plan import Plan
from vapo_megatron.operations.plan.rollout import drawn_prompts, imbalance


def assumptions(plan: Plan) -> list[str]:
    """One line each."""
    hardware, lengths, config, batch = plan.hardware, plan.lengths, plan.config, plan.config.batch
    source = "not measured on your machines"
    if config.plan.gpu_benchmark is not None:
        source = f"linear layers, attention and FP8 as in {config.plan.gpu_benchmark}"
    prompts = batch.prompts_per_step
    uneven = imbalance(plan.world // config.rollout.tp, prompts, prompts * batch.samples_per_prompt, lengths)
    reached = hardware.efficiency
    lines = [
        f"{hardware.kind}: {hardware.device_memory / GIB:.1f} GiB, {hardware.bf16 / 1e12:.0f} TFLOP/s dense bf16, "
        f"memory {hardware.memory_rate / 1e9:.0f} GB/s, NVLink {hardware.nvlink / 1e9:.0f} GB/s, network "
        f"{hardware.network / 1e9:.0f} GB/s a GPU, PCIe {hardware.pcie / 1e9:.0f} GB/s, each in one direction, as the "
        f"maker states them (hardware.*)",
        f"of these rates are reached: linear layers {reached.linear:g}, attention {reached.attention:g}, memory "
        f"{reached.memory:g}, NVLink {reached.nvlink:g}, network {reached.network:g}, PCIe {reached.pcie:g}; a "
        f"decoding step waits {reached.decode_overhead * 1000:g} ms besides, a layer's pass takes "
        f"{reached.layer_overhead * 1000:g} ms at least (hardware.efficiency.*; {source})",
        f"prompts have {lengths.prompt:.0f} tokens, responses {lengths.mean:.0f} on average with a tail up to "
        f"{lengths.longest} (plan.mean_prompt_tokens, plan.mean_response_tokens)",
        f"{hardware.trainer_overhead / GIB:g} GiB of a GPU go to the trainer's context and NCCL, "
        f"{hardware.engine_overhead / GIB:g} GiB to an offloaded engine's, {hardware.fragmentation:.0%} are lost to "
        "fragmentation (hardware.trainer_overhead_gib, .engine_overhead_gib, .fragmentation)",
        "communication does not overlap with computation, grading overlaps with generation "
        f"({config.plan.grade_seconds:g} s a response on each of {config.reward.workers} reward.workers, "
        "plan.grade_seconds); starting and checkpoints are not counted in steps",
        f"checkpoints: the file system takes and gives {hardware.storage / 1e9:g} GB/s in all, a rank puts "
        f"{hardware.rank_save / 1e9:g} GB/s of tensors into files and takes {hardware.rank_load / 1e9:g} GB/s out, "
        "digests included (hardware.storage_gbs, .rank_save_gbs, .rank_load_gbs)",
        f"the engine with most tokens has {uneven:.2f} times the mean, as half of the variance of lengths is between "
        "prompts",
    ]
    if config.algorithm.dynamic_sampling.enabled:
        drawn = drawn_prompts(prompts, config.algorithm.dynamic_sampling, config.plan.informative_share)
        lines.append(
            f"dynamic sampling draws {drawn:.0f} prompts for {prompts}, as {config.plan.informative_share:.0%} of the "
            "groups are informative (plan.informative_share)"
        )
    if plan.memory.engine.deterministic:
        lines.append(f"deterministic engines have {reached.deterministic:g} of the speed of others")
    if model_directory(config.model.path) != Path(config.model.path):
        lines.append(
            f"{config.model.path} is not here: its sizes are those that the package has of "
            f"{Path(config.model.path).name}"
        )
    if any(model.spec.num_experts for model in plan.models.values()):
        lines.append(f"the rank whose experts get most tokens gets {EXPERT_IMBALANCE:g} times the mean")
    if any(model.config.precision.fp8 != "none" for model in plan.models.values()):
        lines.append(
            f"FP8 makes linear layers {reached.fp8_gain:g} times as fast as bf16 (hardware.efficiency.fp8_gain); their "
            "matrices are kept twice in FP8, by rows and by columns; activations are counted as in bf16"
        )
    if any(model.fused for model in plan.models.values()):
        lines.append(
            "layers are Transformer Engine's, as on GPUs with it (model.attention=sdpa: PyTorch's, which keep more)"
        )
    if plan.evaluations and not plan.evaluation_samples:
        lines.append("evaluations are not counted: the files of data.eval cannot be read here")
    return lines
