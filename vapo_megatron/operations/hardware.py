"""Stated rates of the accelerators that plans are made for and that doctor measures against."""

from vapo_megatron.config.plan import HardwareConfig, Kind

GIB = 2**30


# Rates of one GPU that NVIDIA's data sheets state of the SXM modules, links in one direction: MiB that nvidia-smi
# reports, dense bf16 TFLOP/s, GB/s of its memory, of NVLink, of the network adapter that such nodes usually have for
# each GPU, and of PCIe.
RATES: dict[Kind, tuple[float, ...]] = {
    "a100-40g": (40960, 312, 1555, 300, 25, 32),
    "a100-80g": (81920, 312, 2039, 300, 25, 32),
    "h100-80g": (81559, 989, 3350, 450, 50, 64),
    "h200-141g": (143771, 989, 4800, 450, 50, 64),
    "b200-180g": (183359, 2250, 8000, 900, 50, 64),
}


class Hardware:
    """A HardwareConfig in bytes, and bytes or operations per second; what it leaves out is as the maker states it."""

    def __init__(self, config: HardwareConfig) -> None:
        memory_mib, *rates = RATES[config.kind]
        stated = config.bf16_tflops, config.memory_gbs, config.nvlink_gbs, config.network_gbs, config.pcie_gbs
        bf16, memory, nvlink, network, pcie = (override or rate for override, rate in zip(stated, rates, strict=True))
        self.kind, self.gpus_per_node, self.efficiency = config.kind, config.gpus_per_node, config.efficiency
        self.device_memory = (config.device_memory_gib or memory_mib / 1024) * GIB
        self.node_memory, self.rank_memory = config.node_memory_gib * GIB, config.rank_memory_gib * GIB
        self.bf16, self.memory_rate, self.nvlink = bf16 * 1e12, memory * 1e9, nvlink * 1e9
        self.network, self.pcie = network * 1e9, pcie * 1e9
        self.trainer_overhead = config.trainer_overhead_gib * GIB
        self.engine_overhead = config.engine_overhead_gib * GIB
        # Bytes of a GPU that tensors, engines and contexts may take together.
        self.usable_memory = self.device_memory * (1 - config.fragmentation)

    def link(self, ranks: int) -> float:
        """Bytes a second that a collective over this many neighbouring ranks reaches on each of them."""
        if ranks <= self.gpus_per_node:
            return self.nvlink * self.efficiency.nvlink
        return self.network * self.efficiency.network
