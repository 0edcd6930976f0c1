"""Stated rates of the accelerators that plans are made for and that doctor measures against."""

from dataclasses import dataclass

from vapo_megatron.config.hardware import EfficiencyConfig, HardwareConfig, Kind

GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """What a maker states of one GPU. Rates are in operations or bytes per second, links in one direction.

    Attributes:
        memory: bytes that nvidia-smi reports in all.
        bf16: dense matrix products (without sparsity).
        fp8: likewise; 0 where the chip has none.
        memory_rate: of the GPU's own memory.
        nvlink: to the other GPUs of the node.
        pcie: to the host.
        network: adapter that such nodes usually have for each GPU.
        nvlinks: links of a GPU.
        compute_capability: major and minor.
    """

    memory: float
    bf16: float
    fp8: float
    memory_rate: float
    nvlink: float
    pcie: float
    network: float
    nvlinks: int
    compute_capability: tuple[int, int]


_MIB, _TERA, _GIGA = 2**20, 1e12, 1e9

# NVIDIA's data sheets of the SXM modules; memory as nvidia-smi shows it.
RATES: dict[Kind, Rates] = {
    "a100-40g": Rates(40960 * _MIB, 312 * _TERA, 0, 1555 * _GIGA, 300 * _GIGA, 32 * _GIGA, 25 * _GIGA, 12, (8, 0)),
    "a100-80g": Rates(81920 * _MIB, 312 * _TERA, 0, 2039 * _GIGA, 300 * _GIGA, 32 * _GIGA, 25 * _GIGA, 12, (8, 0)),
    "h100-80g": Rates(
        81559 * _MIB, 989 * _TERA, 1979 * _TERA, 3350 * _GIGA, 450 * _GIGA, 64 * _GIGA, 50 * _GIGA, 18, (9, 0)
    ),
    "h200-141g": Rates(
        143771 * _MIB, 989 * _TERA, 1979 * _TERA, 4800 * _GIGA, 450 * _GIGA, 64 * _GIGA, 50 * _GIGA, 18, (9, 0)
    ),
    "b200-180g": Rates(
        183359 * _MIB, 2250 * _TERA, 4500 * _TERA, 8000 * _GIGA, 900 * _GIGA, 64 * _GIGA, 50 * _GIGA, 18, (10, 0)
    ),
}


@dataclass(frozen=True)
class Hardware:
    """A HardwareConfig with every rate filled in; bytes, and bytes or operations per second."""

    kind: Kind
    gpus_per_node: int
    device_memory: float
    node_memory: float
    bf16: float
    memory_rate: float
    nvlink: float
    network: float
    pcie: float
    trainer_overhead: float
    engine_overhead: float
    fragmentation: float
    rank_memory: float
    storage: float
    rank_save: float
    rank_load: float
    efficiency: EfficiencyConfig

    @property
    def usable_memory(self) -> float:
        """Bytes of a GPU that tensors, engines and contexts may take together."""
        return self.device_memory * (1 - self.fragmentation)

    def link(self, ranks: int) -> float:
        """Bytes a second that a collective over this many neighbouring ranks reaches on each of them."""
        if ranks <= self.gpus_per_node:
            return self.nvlink * self.efficiency.nvlink
        return self.network * self.efficiency.network


def resolve(config: HardwareConfig) -> Hardware:
    """The rates of the kind, and what the config says otherwise."""
    rates = RATES[config.kind]

    def given(value: float | None, unit: float, stated: float) -> float:
        return stated if value is None else value * unit

    return Hardware(
        kind=config.kind,
        gpus_per_node=config.gpus_per_node,
        device_memory=given(config.device_memory_gib, GIB, rates.memory),
        node_memory=config.node_memory_gib * GIB,
        bf16=given(config.bf16_tflops, _TERA, rates.bf16),
        memory_rate=given(config.memory_gbs, _GIGA, rates.memory_rate),
        nvlink=given(config.nvlink_gbs, _GIGA, rates.nvlink),
        network=given(config.network_gbs, _GIGA, rates.network),
        pcie=given(config.pcie_gbs, _GIGA, rates.pcie),
        trainer_overhead=config.trainer_overhead_gib * GIB,
        engine_overhead=config.engine_overhead_gib * GIB,
        fragmentation=config.fragmentation,
        rank_memory=config.rank_memory_gib * GIB,
        storage=config.storage_gbs * _GIGA,
        rank_save=config.rank_save_gbs * _GIGA,
        rank_load=config.rank_load_gbs * _GIGA,
        efficiency=config.efficiency,
    )
