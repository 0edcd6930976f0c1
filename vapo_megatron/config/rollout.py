"""Rollouts: how responses are sampled, which servers sample them, how they get the trainer's weights."""

from typing import Literal

from pydantic import Field, field_validator

from vapo_megatron.config.base import Section

Dtype = Literal["float32", "bfloat16"]


class SamplingConfig(Section):
    """How the tokens of a response are drawn."""

    temperature: float = Field(1.0, ge=0, le=10, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling: least probability kept")
    top_k: int = Field(-1, ge=-1, description="-1: the whole vocabulary")
    max_new_tokens: int = Field(ge=1, description="response tokens, EOS included, after which a response is cut")

    @field_validator("top_k")
    @classmethod
    def _top_k_is_a_count(cls, value: int) -> int:
        if value == 0:
            raise ValueError("top_k=0 leaves nothing to sample from: give -1 for the whole vocabulary, or 1 and more")
        return value


class SyncConfig(Section):
    """The hand-over of weights to the engines, and the comparison that follows each."""

    bucket_mib: int = Field(512, ge=1, description="weights sent at once; a buffer of this size stays allocated")
    deadline: float = Field(600.0, gt=0, description="seconds for one answer of the server during the hand-over")
    probe_sequences: int = Field(4, ge=1, description="sequences whose log-probs engine and trainer compare")
    probe_length: int = Field(32, ge=2, description="tokens of each")
    tolerance: float | None = Field(
        None, gt=0, description="largest allowed |difference| of a log-prob; none: 1e-4 in float32, 0.5 in bfloat16"
    )

    def tolerance_for(self, dtype: Dtype) -> float:
        """The tolerance where the coarser of trainer and engine computes in this dtype."""
        if self.tolerance is not None:
            return self.tolerance
        return 1e-4 if dtype == "float32" else 0.5


class RolloutConfig(Section):
    """The SGLang servers. One server takes `tp` devices of one node."""

    engines: int = Field(1, ge=1, description="servers on a machine without GPUs; with GPUs they follow from tp")
    tp: int = Field(1, ge=1, description="tensor-parallel size of one server")
    dtype: Dtype | Literal["auto"] = Field("auto", description="auto: the dtype of the model")
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: skip reading the checkpoint, the first hand-over brings the weights"
    )
    context_length: int | None = Field(None, ge=2, description="prompt and response; none: what the model allows")
    max_running_requests: int = Field(256, ge=1, description="responses that one server generates at once")
    max_total_tokens: int | None = Field(
        None, ge=2, description="tokens of its KV cache; none: what mem_fraction_static leaves, 65536 without a GPU"
    )
    mem_fraction_static: float = Field(0.7, gt=0, lt=1, description="GPU memory for weights and KV cache")
    memory_saver: bool = Field(True, description="GPU: hand the server's memory to the trainer while it trains")
    seeded_sampling: bool = Field(True, description="a response depends on its seed alone, not on its batch")
    start_deadline: float = Field(300.0, gt=0, description="seconds until a server must answer")
    collect_deadline: float = Field(7200.0, gt=0, description="seconds for all responses of one collection")
    server_args: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="further SGLang arguments, named as in `sglang serve --help`, no dashes"
    )
    sync: SyncConfig = SyncConfig()

    @field_validator("server_args")
    @classmethod
    def _server_args_are_ours_to_pass(cls, value: dict[str, bool | int | float | str]) -> dict:
        for name in value:
            if not name.replace("_", "").isalnum():
                raise ValueError(f"server_args.{name}: write it as in chunked_prefill_size, without dashes")
            if name in _SET_BY_US:
                raise ValueError(f"server_args.{name} is set by the trainer: {_SET_BY_US[name]}")
        return value


_SET_BY_US = {
    "host": "127.0.0.1, or the node's own address where ranks are on several nodes",
    "port": "a free one is taken",
    "nnodes": "one server lives on one node",
    "model_path": "use model.path",
    "device": "it follows the machine",
    "skip_tokenizer_init": "requests carry token ids",
    "weight_version": "it counts the hand-overs",
    "tp_size": "use rollout.tp",
    "dtype": "use rollout.dtype",
    "load_format": "use rollout.load_format",
    "context_length": "use rollout.context_length",
    "max_running_requests": "use rollout.max_running_requests",
    "max_total_tokens": "use rollout.max_total_tokens",
    "mem_fraction_static": "use rollout.mem_fraction_static",
    "enable_memory_saver": "use rollout.memory_saver",
    "enable_deterministic_inference": "use rollout.seeded_sampling",
}
