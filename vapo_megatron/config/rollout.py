"""Rollouts: sampling, SGLang servers, and the weight sync."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from vapo_megatron.config.base import Section, key_from_environment

Dtype = Literal["float32", "bfloat16"]
TransportName = Literal["auto", "ipc", "shared_memory", "distributed"]

_MIB = 1 << 20
# Buckets of weights where their size is not set: from MIN to MAX on GPUs that trainer and engine
# share, by their free memory; elsewhere FIXED.
_MIN_BUCKET = 64 * _MIB
_MAX_BUCKET = 4096 * _MIB
_FIXED_BUCKET = 512 * _MIB
# A sync holds two buckets, and tensors gathered or quantised for them.
_BUCKETS_IN_FREE_MEMORY = 8


class SamplingConfig(Section):
    """Sampling of response tokens."""

    temperature: float = Field(1.0, ge=0, le=10, description="sampling temperature; 0 is greedy")
    top_p: float = Field(
        1.0, gt=0, le=1, description="nucleus sampling: cumulative probability to keep; 1: all"
    )
    top_k: int | None = Field(
        None, ge=1, description="only the most likely tokens are drawn; none: all"
    )
    stop: tuple[str, ...] = Field(
        (),
        description="texts that end a response like EOS does, and belong to it; each has to be one "
        "token of the tokenizer",
    )
    max_new_tokens: int = Field(ge=1, description="limit of response tokens, EOS included")


class SyncConfig(Section):
    """How weights are copied to the engines, and how the copy is checked."""

    transport: TransportName = Field(
        "auto",
        description="ipc: CUDA handles, engine and rank on one GPU; shared_memory: host memory; "
        "distributed: network broadcast; auto: distributed to rollout.external_urls, else "
        "ipc on GPUs and shared_memory on CPUs",
    )
    bucket_mib: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="MiB of weights sent at once; two buffers of this size are allocated. auto: on "
        "GPUs that engines share with the trainer an eighth of the free memory, from 64 to 4096; "
        "elsewhere 512",
    )
    gather: Literal["auto", "always"] = Field(
        "auto",
        description="auto: where engines have the trainer's tensor-parallel size and read nothing "
        "else, each of an engine's ranks gets the shares of one trainer rank from the third weight "
        "sync on, and nothing is gathered over tensor-parallel ranks; always: whole tensors are "
        "gathered, as for all other engines",
    )
    only_changes: bool = Field(
        False,
        description="from the third weight sync on send the engines in rollout.external_urls only "
        "the weights that changed, and a bucket whole where they take more than half of it; a copy "
        "of the weights stays in the host memory of rank 0",
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="limit of the log-prob differences between engine and trainer on the probe: "
        "of the largest in float32, of the 0.95 quantile in bfloat16 and FP8; their mean may be "
        "1 (float32), 0.2 (bfloat16) or 0.3 (FP8) times this. none: 1e-4 in float32, 0.5 in "
        "bfloat16, 1.0 in FP8",
    )

    def bucket_bytes(self, free: float) -> int:
        """Limit of a bucket in bytes.

        free: bytes that are free on the GPUs that engines share with the trainer; 0: there are no
            such GPUs.
        """
        if self.bucket_mib != "auto":
            return self.bucket_mib * _MIB
        if not free:
            return _FIXED_BUCKET
        bucket = int(free / _BUCKETS_IN_FREE_MEMORY) // _MIN_BUCKET * _MIN_BUCKET
        return max(_MIN_BUCKET, min(bucket, _MAX_BUCKET))


class AsynchronousConfig(Section):
    """Engines generate while the trainer updates (docs/async.md)."""

    max_staleness: int = Field(
        0,
        ge=0,
        description="steps that generation may run ahead of training; 0: synchronous (on-policy), "
        "engines wait while the trainer works. Above 0 (off-policy) the engines need "
        "separate devices",
    )
    weight_sync: Literal["auto", "wait", "retract", "in_place"] = Field(
        "auto",
        description="running responses at a weight sync. wait: they finish first (reproducible); "
        "retract: they continue under the new weights after another prefill; in_place: they "
        "continue with the old weights' KV cache;  auto: wait with rollout.deterministic, "
        "else retract",
    )


class PartialResponsesConfig(Section):
    """Responses still unfinished when a step has enough groups continue in the next step
    (docs/async.md)."""

    oversampling: float | None = Field(
        None,
        ge=1,
        description="groups in flight as a multiple of those still needed, such as 1.5: a step "
        "trains on the first to finish, the others continue under the next weights; none: a step "
        "waits for all its groups",
    )


class HealthConfig(Section):
    """Engine restarts, and when the run gives up."""

    answer_s: float = Field(
        20.0, gt=0, description="seconds without an answer after which an engine counts as dead"
    )
    max_failures: int = Field(
        3,
        ge=0,
        description="tolerated consecutive failures of one engine, without serving from one "
        "weight sync to the next; after one more the run saves and ends (exit 75)",
    )


class EpisodeConfig(Section):
    """Limits of an agent's episode. Reaching max_turns or max_tokens truncates it; exceeding a
    timeout breaks it."""

    max_turns: int = Field(16, ge=1, description="responses of the policy per episode")
    max_tokens: int = Field(
        8192,
        ge=8,
        description="tokens of an episode: prompts, responses and observations of all its segments",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="time limit of an episode in seconds, excluding waits for an engine",
    )
    call_timeout_s: float | None = Field(
        None,
        gt=0,
        description="time limit in seconds of one policy response, excluding waits, or of the "
        "tools between two responses; none: only timeout_s",
    )
    processes: int = Field(
        0,
        ge=0,
        description="processes that share the episodes, each with the agent's code, an endpoint "
        "and chat templates of its own, for thousands of episodes at once; 0: all are played in "
        "rank 0's process, by one core",
    )
    tool_parser: str | None = Field(
        None,
        pattern=r"^[\w.-]+$",
        description="SGLang's parser for the model's tool calls (qwen25, llama3, mistral ...); "
        "none: answers are text",
    )


class RolloutConfig(Section):
    """The SGLang servers. Each server uses `tp` devices, of one node or of `nodes` whole ones."""

    CONFLICTS = (
        (
            "asynchronous.weight_sync!=auto",
            "asynchronous.max_staleness=0",
            "no response runs during a weight sync then, set max_staleness, or leave weight_sync "
            "out",
        ),
        (
            "asynchronous.weight_sync=retract|in_place",
            "deterministic=true",
            "when a response changes weights depends on timing, set weight_sync=wait or "
            "deterministic=false",
        ),
        (
            "agent",
            "partial_responses.oversampling",
            "an episode cannot be stopped in a turn; unset one of them",
        ),
        (
            "router_replay",
            "asynchronous.max_staleness>0, partial_responses.oversampling",
            "old weights chose other experts than the policy would; unset one of them",
        ),
        (
            "windows>1",
            "asynchronous.max_staleness>0, partial_responses.oversampling, router_replay",
            "each step trains on all that the previous weights have generated, and on nothing "
            "else; unset one of them",
        ),
        (
            "partial_responses.oversampling",
            "asynchronous.max_staleness>0",
            "responses already continue across steps there; unset one of them",
        ),
        (
            "partial_responses.oversampling",
            "deterministic=true",
            "which responses are finished depends on timing; unset one of them",
        ),
        (
            "quantization=fp8",
            "load_format!=dummy",
            "the checkpoint is not in FP8, set load_format=dummy",
        ),
        (
            "sync.transport!=auto|distributed",
            "external_urls",
            "these engines share no memory with the trainer, set auto",
        ),
        ("num_engines!=1", "external_urls", "no engine is started, leave it out"),
        (
            "nodes!=1",
            "sync.transport=shared_memory",
            "nodes share no memory, set auto or distributed",
        ),
    )

    external_urls: tuple[str, ...] = Field(
        (),
        description="http://host:port of engines started by `vapo-megatron engine` on other "
        "devices; none: the run starts its own engines",
    )
    api_key_variable: str | None = Field(
        None,
        description="environment variable with the API key of the engines in external_urls; "
        "required unless they listen on 127.0.0.1",
    )
    num_engines: int = Field(
        1,
        ge=1,
        description="number of servers on a machine without GPUs; with GPUs it follows from tp",
    )
    cpu_threads: int = Field(
        1,
        ge=1,
        description="threads of a server on a machine without GPUs; more than there are free cores "
        "make a small model dozens of times slower",
    )
    share_prompts: bool = Field(
        False,
        description="on a machine without GPUs: compute the prompt of a group once, not with each "
        "of its responses; pays for prompts of 32 tokens and more. Servers on GPUs cache prompts "
        "anyway",
    )
    tp: int = Field(1, ge=1, description="tensor-parallel size of one server")
    nodes: int = Field(
        1,
        ge=1,
        description="nodes that one server is on, each with tp / nodes of its devices: all GPUs of "
        "a node if above 1, for a model that one node cannot hold",
    )
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="fp8: weights in e4m3 with a scale per block of 128 x 128, quantised during "
        "the weight sync; needs load_format=dummy and GPUs with FP8",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="dummy: do not read the checkpoint; the first weight sync delivers the weights",
    )
    context_length: int | None = Field(
        None,
        ge=2,
        description="limit of prompt plus response tokens; none: the model's limit",
    )
    max_running_requests: int = Field(
        256, ge=1, description="largest number of responses that one server generates concurrently"
    )
    max_total_tokens: int | None = Field(
        None,
        ge=2,
        description="size of a server's KV cache in tokens; none: as mem_fraction_static allows; "
        "without a GPU context_length x max_running_requests, at most 65536",
    )
    mem_fraction_static: float = Field(
        0.7, gt=0, lt=1, description="fraction of GPU memory for weights and KV cache"
    )
    deterministic: bool | Literal["auto"] = Field(
        "auto",
        description="batch-invariant kernels and seeded sampling, so that a response depends on "
        "its seed and not on its batch; auto: on for CPUs and for float32, otherwise off, since "
        "SGLang measured 34 % less speed on GPUs",
    )
    router_replay: bool = Field(
        False,
        description="score and train the policy with the experts that the engines chose for each "
        "token",
    )
    start_timeout_s: float = Field(
        900.0,
        gt=0,
        description="time limit in seconds of a server's start and of each of its first batches; "
        "on GPUs both may compile kernels for minutes",
    )
    collect_timeout_s: float = Field(
        7200.0,
        gt=0,
        description="seconds without a new response or grade after which collecting a step fails",
    )
    server_args: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="further SGLang arguments, named as in `sglang serve --help` with underscores",
    )
    sync: SyncConfig = SyncConfig()
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    partial_responses: PartialResponsesConfig = PartialResponsesConfig()
    windows: int = Field(
        1,
        ge=1,
        description="parts of sampling.max_new_tokens, or of an agent's episode.max_turns, one "
        "per step; an unfinished response trains the policy and continues in the next step "
        "(T-PPO), which needs algorithm.shaping.truncated=window; 1: whole responses",
    )
    health: HealthConfig = HealthConfig()
    agent: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="package.module:name of async f(task, base_url, http_client) -> reward, or "
        "of an environment, or verifiers:NAME. Training then collects its episodes; none: each "
        "response answers a prompt",
    )
    episode: EpisodeConfig = EpisodeConfig()

    @field_validator("external_urls")
    @classmethod
    def _are_server_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not _is_address(address):
                raise ValueError(f"external_urls: {address!r} is not of the form http://host:port")
        if len(set(value)) < len(value):
            raise ValueError("external_urls: an address is given twice")
        return value

    def api_key(self) -> str | None:
        """The key of the engines in external_urls; None without api_key_variable. Raises BadInput
        where that is not set."""
        remedy = "with the same value for the engines and the trainer"
        return key_from_environment(self.api_key_variable, "rollout.api_key_variable", remedy)

    @property
    def experts_on(self) -> int:
        """Ranks of a server that whole experts are spread over; the others shard each expert."""
        return self._divisor_of_tp("ep_size")

    @property
    def attention_parts(self) -> int:
        """Groups of a server's GPUs with separate requests; attention is sharded within a group."""
        return self._divisor_of_tp("attn_dp_size")

    def _divisor_of_tp(self, argument: str) -> int:
        """The value of a server argument if it divides tp, otherwise 1."""
        parts = self.server_args.get(argument)
        if not isinstance(parts, int) or parts <= 0 or self.tp % parts:
            return 1
        return parts

    def reading_checkpoints(self) -> "RolloutConfig":
        """Returns this section for engines that read a checkpoint and get no weights."""
        settings_for_weights = {
            "load_format": "auto",
            "external_urls": (),
            "router_replay": False,
            "quantization": "none",
        }
        return self.model_copy(update=settings_for_weights)

    def is_deterministic(self, dtype: str, on_gpus: bool) -> bool:
        """Whether an engine with this dtype is deterministic."""
        if self.deterministic == "auto":
            return not on_gpus or dtype == "float32"
        return self.deterministic

    def sync_mode(self, dtype: str, on_gpus: bool) -> Literal["wait", "retract", "in_place"]:
        """Treatment of running responses at a weight sync; a synchronous run has none."""
        if not self.asynchronous.max_staleness:
            return "wait"
        if self.asynchronous.weight_sync != "auto":
            return self.asynchronous.weight_sync
        if self.is_deterministic(dtype, on_gpus):
            return "wait"
        return "retract"

    @model_validator(mode="after")
    def _nodes_share_devices(self) -> "RolloutConfig":
        if self.tp % self.nodes:
            raise ValueError(
                f"nodes={self.nodes} does not divide tp={self.tp}: each node has as many of a "
                "server's devices, choose a divisor"
            )
        return self

    @field_validator("server_args")
    @classmethod
    def _are_free_arguments(cls, value: dict[str, bool | int | float | str]) -> dict:
        for name in value:
            if not name.replace("_", "").isalnum():
                raise ValueError(
                    f"server_args.{name}: write it as in chunked_prefill_size, without dashes"
                )
            if name in _OTHER_NAMES:
                raise ValueError(f"server_args.{name}: write {_OTHER_NAMES[name]}")
            if name in _SET_BY_US or name in cls.model_fields:
                raise ValueError(
                    f"server_args.{name} is set by the trainer: "
                    f"{_SET_BY_US.get(name, f'use rollout.{name}')}"
                )
        return value


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return (
            parts.scheme == "http"
            and bool(parts.hostname and parts.port)
            and address == f"http://{parts.netloc}"
        )
    except ValueError:
        return False


# SGLang aliases of arguments that the trainer reads.
_OTHER_NAMES = {
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "attention_data_parallel_size": "attn_dp_size",
}
_SET_BY_US = {
    "api_key": "the trainer makes a key, or use rollout.api_key_variable",
    "admin_api_key": "the trainer makes a key, or use rollout.api_key_variable",
    "host": "127.0.0.1, or the node's own address where ranks are on several nodes",
    "port": "a free port is taken",
    "nnodes": "use rollout.nodes",
    "node_rank": "it follows from rollout.nodes, or use `vapo-megatron engine --node`",
    "dist_init_addr": "it follows from rollout.nodes, or use `vapo-megatron engine --meet`",
    "nccl_init_addr": "it follows from rollout.nodes, or use `vapo-megatron engine --meet`",
    "dp_size": "SGLang supports no weight sync with it: start more engines, or use attn_dp_size",
    "data_parallel_size": "SGLang supports no weight sync with it: start more engines, or use "
    "attn_dp_size",
    "enable_eplb": "weights go to the places of experts as they were at the start",
    "pp_size": "engines are sharded by rollout.tp only",
    "pipeline_parallel_size": "engines are sharded by rollout.tp only",
    "model_path": "use model.path",
    "model": "use model.path",
    "device": "it follows the machine",
    "skip_tokenizer_init": "requests carry token ids",
    "weight_version": "it counts the weight syncs",
    "tp_size": "use rollout.tp",
    "tensor_parallel_size": "use rollout.tp",
    "dtype": "use model.dtype",
    "json_model_override_args": "it carries rollout.quantization",
    "enable_memory_saver": "it is on where engines and trainer share GPUs",
    "enable_deterministic_inference": "use rollout.deterministic",
    "enable_return_routed_experts": "use rollout.router_replay",
}
