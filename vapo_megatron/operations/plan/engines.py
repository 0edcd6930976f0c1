"""The engines of a run: what they hold of a GPU, how many responses they generate at once."""

from dataclasses import dataclass

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.operations.hardware import Hardware
from vapo_megatron.weights.spec import ModelSpec

# SGLang's prefill takes the prompts in pieces of at most this many tokens (its chunked_prefill_size on such GPUs).
_PREFILL_TOKENS = 8192


@dataclass(frozen=True)
class PlannedEngine:
    """One server on `config.tp` GPUs.

    Attributes:
        spec: the policy.
        config: the rollout section.
        width: bytes of a cache entry, and of a weight that is not quantised.
        hardware: of each of its GPUs.
        taken: bytes of a GPU that the offloaded trainer keeps while the engine starts.
    """

    spec: ModelSpec
    config: RolloutConfig
    width: int
    hardware: Hardware
    taken: float

    @property
    def weights(self) -> float:
        """Bytes of weights on each of its GPUs; embedding and head are cut like the rest."""
        table = self.spec.vocab_size * self.spec.hidden_size
        outside = table * (1 if self.spec.tied else 2)
        layers = self.spec.parameter_count() - outside + self.copied
        # Like attention, the embedding is cut over a part of the GPUs where parts have requests of their own.
        outside += table * (self.config.attention_parts - 1)
        return (layers * self.layer_width + outside * self.width) / self.config.tp

    @property
    def copied(self) -> int:
        """Parameters of attention that it has beyond one copy: every part of its GPUs has all of them."""
        size = self.spec.query_size + self.spec.kv_size
        return (self.config.attention_parts - 1) * self.spec.num_layers * 2 * self.spec.hidden_size * size

    @property
    def quantised(self) -> bool:
        """Whether the layers' matrices are in FP8; embedding and head are not."""
        return self.config.quantization == "fp8"

    @property
    def layer_width(self) -> float:
        """Bytes of a weight of the layers; in FP8 a block of 128 x 128 has a scale of four bytes."""
        return 1 + 4 / 128**2 if self.quantised else float(self.width)

    @property
    def deterministic(self) -> bool:
        """Whether its kernels are batch-invariant."""
        return self.config.is_deterministic("float32" if self.width == 4 else "bfloat16", True)

    @property
    def static(self) -> float:
        """Bytes of a GPU for weights and KV cache: mem_fraction_static of what is free when the engine starts."""
        return self.config.mem_fraction_static * max(0.0, self.hardware.device_memory - self.taken)

    @property
    def cache_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token on each GPU that has it; key-value heads fewer than GPUs are copied."""
        heads = max(1.0, self.spec.num_kv_heads * self.config.attention_parts / self.config.tp)
        return 2.0 * self.spec.num_layers * heads * self.spec.head_dim * self.width

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache of one part of its GPUs holds; 0 or less where the weights alone do not fit."""
        found = int((self.static - self.weights) / self.cache_bytes_per_token)
        limit = self.config.max_total_tokens
        return found if limit is None else min(found, limit)

    @property
    def cache(self) -> float:
        """Bytes of the KV cache on each GPU."""
        return max(0, self.cache_tokens) * self.cache_bytes_per_token

    @property
    def workspace(self) -> float:
        """Bytes of a GPU beside weights and cache: context and graphs, a piece of prefill, the logits of a batch."""
        spec, tp = self.spec, self.config.tp
        ffn = (
            spec.experts_per_token * spec.expert_ffn_size + spec.shared_ffn_size if spec.num_experts else spec.ffn_size
        )
        prefill = _PREFILL_TOKENS * (4 * spec.hidden_size + (3 * ffn + 2 * spec.query_size) / tp) * self.width
        logits = 2 * 4 * self.config.max_running_requests * spec.vocab_size
        return self.hardware.engine_overhead + prefill + logits

    def at_once(self, tokens: float) -> float:
        """Responses generated together where each takes this many tokens of the cache on average."""
        parts = self.config.attention_parts
        return max(0.0, min(self.config.max_running_requests, parts * self.cache_tokens / tokens))
