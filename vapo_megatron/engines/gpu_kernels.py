"""What SGLang's kernels on GPUs can compute, known before a server starts. Source: SGLang 0.5.23."""

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.spec import ModelSpec

# Of layers/rotary_embedding/base.py: other heads are rotated by cosines and sines of the activations' dtype.
_HEAD_SIZES_WITH_FP32_ROPE = (64, 128, 256, 512)


def check_kernels(config: RolloutConfig, dtype: str, on_gpus: bool) -> None:
    """Raises BadInput where an engine of this dtype would end at its first token for want of a kernel."""
    if on_gpus and dtype == "float32" and not config.is_deterministic(dtype, on_gpus):
        raise BadInput(
            "rollout.deterministic=false with an engine in float32 on GPUs: sgl_kernel.rmsnorm and fused_add_rmsnorm "
            "take 16-bit numbers alone; set rollout.deterministic=true, or rollout.dtype=bfloat16"
        )


def rope_note(spec: ModelSpec, dtype: str, on_gpus: bool) -> str | None:
    """A warning where the engine's rotary embedding is coarser than the trainer's; None where it is not."""
    if not on_gpus or dtype == "float32" or spec.head_dim in _HEAD_SIZES_WITH_FP32_ROPE:
        return None
    sizes = ", ".join(map(str, _HEAD_SIZES_WITH_FP32_ROPE))
    return (
        f"heads of {spec.head_dim}: on GPUs SGLang rotates them by cosines and sines in {dtype} (in float32 for "
        f"heads of {sizes}), so that log-probs of engine and trainer differ more; raise rollout.sync.tolerance if "
        "the comparison after a weight sync fails"
    )
