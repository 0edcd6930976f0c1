"""The inputs of a plan: rates of accelerators, sizes of models, lengths of samples. Light to
import."""

from dataclasses import dataclass
from pathlib import Path

from vapo_megatron.config.plan import HardwareConfig, Kind, PlanConfig
from vapo_megatron.errors import BadInput

GIB = 2**30


# Rates of one GPU that NVIDIA's data sheets state of the SXM modules, links in one direction: MiB
# that nvidia-smi reports, dense bf16 TFLOP/s, GB/s of its memory, of NVLink, of the network adapter
# that such nodes usually have for each GPU, and of PCIe.
RATES: dict[Kind, tuple[float, ...]] = {
    "a100-40g": (40960, 312, 1555, 300, 25, 32),
    "a100-80g": (81920, 312, 2039, 300, 25, 32),
    "h100-80g": (81559, 989, 3350, 450, 50, 64),
    "h200-141g": (143771, 989, 4800, 450, 50, 64),
    "b200-180g": (183359, 2250, 8000, 900, 50, 64),
}


class Hardware:
    """A HardwareConfig in bytes, and bytes or operations per second; unset fields have the maker's
    figures."""

    def __init__(self, config: HardwareConfig) -> None:
        memory_mib, *rates = RATES[config.kind]
        stated = (
            config.bf16_tflops,
            config.memory_gbs,
            config.nvlink_gbs,
            config.network_gbs,
            config.pcie_gbs,
        )
        bf16, memory, nvlink, network, pcie = (
            override or rate for override, rate in zip(stated, rates, strict=True)
        )
        self.kind = config.kind
        self.gpus_per_node = config.gpus_per_node
        self.efficiency = config.efficiency
        self.device_memory = (config.device_memory_gib or memory_mib / 1024) * GIB
        self.node_memory = config.node_memory_gib * GIB
        self.rank_memory = config.rank_memory_gib * GIB
        self.bf16 = bf16 * 1e12
        self.memory_rate = memory * 1e9
        self.nvlink = nvlink * 1e9
        self.network = network * 1e9
        self.pcie = pcie * 1e9
        self.trainer_overhead = config.trainer_overhead_gib * GIB
        self.engine_overhead = config.engine_overhead_gib * GIB
        # Bytes of a GPU that tensors, engines and contexts may take together.
        self.usable_memory = self.device_memory * (1 - config.fragmentation)

    def link(self, ranks: int) -> float:
        """Bytes a second that a collective over this many neighbouring ranks reaches on each of
        them."""
        if ranks <= self.gpus_per_node:
            return self.nvlink * self.efficiency.nvlink
        return self.network * self.efficiency.network


# config.json of models, by the last part of their path, for plans made before their weights are
# downloaded.
SHIPPED = Path(__file__).parent / "sizes"


def model_directory(path: str) -> Path:
    """The directory with a model's config.json: its own, or if that has none, the one shipped under
    its name.

    Raises:
        BadInput: there is no such directory, and none of that name is shipped.
    """
    # A tuned model has the sizes of the one that it was made of.
    name = Path(path).name.removesuffix("-Instruct").removesuffix("-Base")
    shipped = SHIPPED / name
    if shipped.is_dir() and not (Path(path) / "config.json").exists():
        return shipped
    if not Path(path).exists():
        names = sorted(folder.name for folder in SHIPPED.iterdir())
        raise BadInput(
            f"{path}: no such directory; give a Hugging Face model directory (its config.json is "
            f"enough), or plan with "
            f"the sizes of a model of the same shape: model.path={'|'.join(names)}"
        )
    return Path(path)


@dataclass(frozen=True)
class Lengths:
    """Tokens of samples: every prompt has `prompt`, a response longest * u^a with u uniform on [0,
    1].

    The exponent a follows from the mean, longest / (1 + a): one number to assume, a tail that
    reaches the longest response, and closed forms of all that is needed.
    """

    prompt: float
    mean: float
    longest: int
    longest_prompt: int

    @property
    def exponent(self) -> float:
        """a."""
        return self.longest / self.mean - 1

    @property
    def sample(self) -> float:
        """Mean tokens of prompt and response."""
        return self.prompt + self.mean

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.longest_prompt + self.longest

    @property
    def mean_square(self) -> float:
        """Mean of the squared tokens of a sample, which attention costs."""
        return (
            self.prompt**2 + 2 * self.prompt * self.mean + self.longest**2 / (1 + 2 * self.exponent)
        )

    @property
    def running(self) -> float:
        """Mean tokens that a running response has in the cache: the prompt and E[L^2] / 2E[L], as
        long ones run longer."""
        return self.prompt + self.longest**2 / (1 + 2 * self.exponent) / (2 * self.mean)

    def still_running(self, tokens: float) -> float:
        """Share of responses longer than this."""
        if tokens >= self.longest:
            return 0.0
        if self.exponent == 0:
            return 1.0
        return float(1 - (tokens / self.longest) ** (1 / self.exponent))


def planned_lengths(config: PlanConfig) -> Lengths:
    """The lengths of a config: its own means, or half of the allowed lengths.

    Raises:
        BadInput: a mean is above the longest.
    """
    longest = config.sampling.max_new_tokens
    longest_prompt = config.data.max_prompt_tokens
    response = config.plan.mean_response_tokens or max(1, longest // 2)
    prompt = config.plan.mean_prompt_tokens or max(1, longest_prompt // 2)
    for key, mean, limit_key, limit in (
        ("mean_response_tokens", response, "sampling.max_new_tokens", longest),
        ("mean_prompt_tokens", prompt, "data.max_prompt_tokens", longest_prompt),
    ):
        if mean > limit:
            raise BadInput(
                f"plan.{key}={mean} is above {limit_key}={limit}: lower it, a mean is at most the "
                f"longest"
            )
    return Lengths(float(prompt), float(response), longest, longest_prompt)
