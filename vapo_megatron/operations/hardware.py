"""Stated rates of the accelerators that plans are made for and that doctor measures against."""

from typing import NamedTuple

from vapo_megatron.config.plan import HardwareConfig, Kind

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9


class Rates(NamedTuple):
    """What a maker states of one GPU, in the units of HardwareConfig; links in one direction.

    Attributes:
        memory_mib: that nvidia-smi reports in all.
        bf16_tflops: dense matrix products (without sparsity).
        memory_gbs: of the GPU's own memory.
        nvlink_gbs: to the other GPUs of the node.
        network_gbs: adapter that such nodes usually have for each GPU.
        pcie_gbs: to the host.
    """

    memory_mib: int
    bf16_tflops: float
    memory_gbs: float
    nvlink_gbs: float
    network_gbs: float
    pcie_gbs: float


# NVIDIA's data sheets of the SXM modules; memory as nvidia-smi shows it.
RATES: dict[Kind, Rates] = {
    "a100-40g": Rates(40960, 312, 1555, 300, 25, 32),
    "a100-80g": Rates(81920, 312, 2039, 300, 25, 32),
    "h100-80g": Rates(81559, 989, 3350, 450, 50, 64),
    "h200-141g": Rates(143771, 989, 4800, 450, 50, 64),
    "b200-180g": Rates(183359, 2250, 8000, 900, 50, 64),
}


class Hardware:
    """A HardwareConfig in bytes, and bytes or operations per second; what it leaves out is as the maker states it."""

    def __init__(self, config: HardwareConfig) -> None:
        rates = RATES[config.kind]
        self.kind, self.gpus_per_node, self.efficiency = config.kind, config.gpus_per_node, config.efficiency
        self.device_memory = (config.device_memory_gib or rates.memory_mib / 1024) * GIB
        self.node_memory = config.node_memory_gib * GIB
        self.bf16 = (config.bf16_tflops or rates.bf16_tflops) * _TERA
        self.memory_rate = (config.memory_gbs or rates.memory_gbs) * _GIGA
        self.nvlink = (config.nvlink_gbs or rates.nvlink_gbs) * _GIGA
        self.network = (config.network_gbs or rates.network_gbs) * _GIGA
        self.pcie = (config.pcie_gbs or rates.pcie_gbs) * _GIGA
        self.trainer_overhead = config.trainer_overhead_gib * GIB
        self.engine_overhead = config.engine_overhead_gib * GIB
        self.fragmentation = config.fragmentation
        self.rank_memory = config.rank_memory_gib * GIB
        self.storage = config.storage_gbs * _GIGA
        self.rank_save = config.rank_save_gbs * _GIGA

    @property
    def usable_memory(self) -> float:
        """Bytes of a GPU that tensors, engines and contexts may take together."""
        return self.device_memory * (1 - self.fragmentation)

    def link(self, ranks: int) -> float:
        """Bytes a second that a collective over this many neighbouring ranks reaches on each of them."""
        if ranks <= self.gpus_per_node:
            return self.nvlink * self.efficiency.nvlink
        return self.network * self.efficiency.network
