"""Rollouts: sampling of responses, the servers, and how these get the trainer's weights."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from vapo_megatron.config.base import Section, key_from_environment

Dtype = Literal["float32", "bfloat16"]
TransportName = Literal["auto", "ipc", "shared_memory", "distributed"]


class SamplingConfig(Section):
    """How the tokens of a response are drawn."""

    temperature: float = Field(1.0, ge=0, le=10, description="sampling temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling: cumulative probability to keep; 1: all")
    max_new_tokens: int = Field(ge=1, description="limit of response tokens, EOS included")


class SyncConfig(Section):
    """How weights are copied to the engines, and how the copy is checked."""

    transport: TransportName = Field(
        "auto",
        description="ipc: CUDA handles, engine and rank on one GPU; shared_memory: host memory; distributed: network "
        "broadcast; auto: distributed to rollout.external_urls, else ipc on GPUs and shared_memory on CPUs",
    )
    bucket_mib: int = Field(
        512, ge=1, description="MiB of weights sent at once; two buffers of this size are allocated"
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="limit of the log-prob differences between engine and trainer on the probe: of the largest in "
        "float32, of the 0.95 quantile in bfloat16 and FP8; their mean may be 1 (float32), 0.2 (bfloat16) or 0.3 (FP8) "
        "times this. none: 1e-4 in float32, 0.5 in bfloat16, 1.0 in FP8",
    )


class AsynchronousConfig(Section):
    """Engines generate while the trainer updates (docs/async.md)."""

    max_staleness: int = Field(
        0,
        ge=0,
        description="how many steps ahead of training groups may be drawn; 0: synchronous, the engines wait while the "
        "trainer works. Above 0 the engines need devices that they do not share with the trainer",
    )
    weight_sync: Literal["auto", "wait", "retract", "in_place"] = Field(
        "auto",
        description="running responses at a weight sync. wait: they finish first (reproducible); retract: they "
        "continue under the new weights, which read their tokens again; in_place: they continue with the old weights' "
        "KV cache; auto: wait with rollout.deterministic, else retract",
    )


class PartialResponsesConfig(Section):
    """Responses still unfinished when a step has enough groups continue in the next step (docs/async.md)."""

    oversampling: float | None = Field(
        None,
        ge=1,
        description="groups in flight as a multiple of those still needed, such as 1.5: a step trains on the first to "
        "finish, the others continue under the next weights; none: a step waits for all its groups",
    )


class HealthConfig(Section):
    """When an engine is restarted, and when the run gives up."""

    answer_s: float = Field(20.0, gt=0, description="seconds without an answer after which an engine counts as dead")
    max_failures: int = Field(
        3,
        ge=0,
        description="consecutive failures of one engine, without serving from one weight sync to the next, that the "
        "run tolerates; after one more it saves and ends (exit 75)",
    )


class EpisodeConfig(Section):
    """Limits of an agent's episode. Reaching max_turns or max_tokens truncates it; exceeding a timeout breaks it."""

    max_turns: int = Field(16, ge=1, description="responses of the policy per episode")
    max_tokens: int = Field(
        8192, ge=8, description="tokens of an episode: prompts, responses and observations of all its segments"
    )
    timeout_s: float = Field(
        600.0, gt=0, description="seconds that an episode may take, without its waits for an engine that has room"
    )
    call_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds that one call within it may take: a response of the policy, counted likewise, or the "
        "agent's tools between two of them; none: timeout_s alone",
    )
    tool_parser: str | None = Field(
        None,
        pattern=r"^[\w.-]+$",
        description="SGLang's parser for the model's tool calls (qwen25, llama3, mistral ...); none: answers are text",
    )


class RolloutConfig(Section):
    """The SGLang servers. Each server uses `tp` devices of one node."""

    CONFLICTS = (
        (
            "asynchronous.weight_sync!=auto",
            "asynchronous.max_staleness=0",
            "no response runs during a weight sync then, set max_staleness, or leave weight_sync out",
        ),
        (
            "asynchronous.weight_sync=retract|in_place",
            "deterministic=true",
            "when a response changes weights depends on timing, set weight_sync=wait or deterministic=false",
        ),
        ("agent", "partial_responses.oversampling", "an episode cannot be stopped in a turn; unset one of them"),
        (
            "router_replay",
            "asynchronous.max_staleness>0, partial_responses.oversampling",
            "the experts of old weights are not those of the policy; unset one of them",
        ),
        (
            "windows>1",
            "asynchronous.max_staleness>0, partial_responses.oversampling, router_replay",
            "each step trains on all that the previous weights have generated, and on nothing else; unset one of them",
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
        ("quantization=fp8", "load_format!=dummy", "the checkpoint is not in FP8, set load_format=dummy"),
        (
            "sync.transport!=auto|distributed",
            "external_urls",
            "these engines share no memory with the trainer, set auto",
        ),
        ("num_engines!=1", "external_urls", "no engine is started, leave it out"),
    )

    external_urls: tuple[str, ...] = Field(
        (),
        description="addresses, as http://host:port, of engines on other devices that `vapo-megatron engine` has "
        "started; none: the run starts its own engines",
    )
    api_key_variable: str | None = Field(
        None,
        description="environment variable with the API key of the engines in external_urls; required unless they "
        "listen on 127.0.0.1",
    )
    num_engines: int = Field(
        1, ge=1, description="number of servers on a machine without GPUs; with GPUs it follows from tp"
    )
    tp: int = Field(1, ge=1, description="tensor-parallel size of one server")
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="fp8: weights in e4m3 with a scale per block of 128 x 128, quantised during the weight sync; needs "
        "load_format=dummy and GPUs with FP8",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: do not read the checkpoint; the first weight sync delivers the weights"
    )
    context_length: int | None = Field(
        None, ge=2, description="limit of prompt and response tokens together; none: that of the model"
    )
    max_running_requests: int = Field(
        256, ge=1, description="largest number of responses that one server generates concurrently"
    )
    max_total_tokens: int | None = Field(
        None,
        ge=2,
        description="size of a server's KV cache in tokens; none: as mem_fraction_static allows; 65536 without a GPU",
    )
    mem_fraction_static: float = Field(0.7, gt=0, lt=1, description="share of GPU memory for weights and KV cache")
    deterministic: bool | Literal["auto"] = Field(
        "auto",
        description="batch-invariant kernels and seeded sampling, so that a response depends on its seed and not on "
        "its batch; auto: on for CPUs and for float32, otherwise off, since SGLang measured 34 % less speed on GPUs",
    )
    router_replay: bool = Field(
        False, description="score and train the policy with the experts that the engines chose for each token"
    )
    start_timeout_s: float = Field(
        900.0,
        gt=0,
        description="time limit in seconds of a server's start and of each of its first batches; on GPUs both may "
        "compile kernels for minutes",
    )
    collect_timeout_s: float = Field(7200.0, gt=0, description="time limit of collecting a step, in seconds")
    server_args: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="further SGLang arguments, named as in `sglang serve --help` with underscores"
    )
    sync: SyncConfig = SyncConfig()
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    partial_responses: PartialResponsesConfig = PartialResponsesConfig()
    windows: int = Field(
        1,
        ge=1,
        description="parts of sampling.max_new_tokens, or of an agent's episode.max_turns, one per step; an unfinished "
        "response trains the policy and continues in the next step (T-PPO), which needs "
        "algorithm.shaping.truncated=window; 1: whole responses",
    )
    health: HealthConfig = HealthConfig()
    agent: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="package.module:name of async f(task, base_url, http_client) -> reward, or of an environment, or "
        "verifiers:NAME. Training then collects its episodes; none: each response answers a prompt",
    )
    episode: EpisodeConfig = EpisodeConfig()

    @field_validator("external_urls")
    @classmethod
    def _urls_are_of_servers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not _is_address(address):
                raise ValueError(f"external_urls: {address!r} is not of the form http://host:port")
        if len(set(value)) < len(value):
            raise ValueError("external_urls: an address is given twice")
        return value

    def api_key(self) -> str | None:
        """The key of the engines in external_urls; None without api_key_variable. Raises BadInput where that is not
        set."""
        remedy = "with the same value for the engines and the trainer"
        return key_from_environment(self.api_key_variable, "rollout.api_key_variable", remedy)

    @property
    def experts_on(self) -> int:
        """Ranks of a server that whole experts are distributed over; each expert is sharded over the other ranks."""
        parts = self.server_args.get("ep_size", 1)
        return parts if isinstance(parts, int) and parts > 0 and self.tp % parts == 0 else 1

    @property
    def attention_parts(self) -> int:
        """Groups of a server's GPUs with their own requests each; attention is sharded over the GPUs of a group."""
        parts = self.server_args.get("attn_dp_size", 1)
        return parts if isinstance(parts, int) and parts > 0 and self.tp % parts == 0 else 1

    def reading_checkpoints(self) -> "RolloutConfig":
        """This section for engines that read a checkpoint and receive no weights, as in an evaluation."""
        fed = {"load_format": "auto", "external_urls": (), "router_replay": False}
        return self.model_copy(update=fed | {"quantization": "none"})

    def is_deterministic(self, dtype: str, on_gpus: bool) -> bool:
        """Whether an engine that computes in this dtype is deterministic."""
        return not on_gpus or dtype == "float32" if self.deterministic == "auto" else self.deterministic

    def sync_mode(self, dtype: str, on_gpus: bool) -> Literal["wait", "retract", "in_place"]:
        """What happens to running responses at a weight sync; in a synchronous run there are none."""
        if self.asynchronous.max_staleness and self.asynchronous.weight_sync != "auto":
            return self.asynchronous.weight_sync
        return "retract" if self.asynchronous.max_staleness and not self.is_deterministic(dtype, on_gpus) else "wait"

    @field_validator("server_args")
    @classmethod
    def _server_args_are_ours_to_pass(cls, value: dict[str, bool | int | float | str]) -> dict:
        for name in value:
            if not name.replace("_", "").isalnum():
                raise ValueError(f"server_args.{name}: write it as in chunked_prefill_size, without dashes")
            if name in _OTHER_NAMES:
                raise ValueError(f"server_args.{name}: write {_OTHER_NAMES[name]}")
            if name in _SET_BY_US or name in cls.model_fields:
                raise ValueError(
                    f"server_args.{name} is set by the trainer: {_SET_BY_US.get(name, f'use rollout.{name}')}"
                )
        return value


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme == "http" and bool(parts.hostname and parts.port) and address == f"http://{parts.netloc}"
    except ValueError:
        return False


# SGLang's aliases of arguments that the trainer reads.
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
    "nnodes": "an engine is on one node",
    "node_rank": "an engine is on one node",
    "dist_init_addr": "an engine is on one node",
    "nccl_init_addr": "an engine is on one node",
    "dp_size": "SGLang supports no weight sync with it: start more engines, or use attn_dp_size",
    "data_parallel_size": "SGLang supports no weight sync with it: start more engines, or use attn_dp_size",
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
