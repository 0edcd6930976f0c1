"""The process groups of one model's layout. Several meshes live in one process, over the same
ranks."""

import itertools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron import cpu_torch
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.models.spec import ModelSpec

# From the fastest links outwards, as in Megatron's own order "tp-cp-ep-dp-pp".
_DIMENSIONS = ["tp", "cp", "dp", "pp"]
# The same ranks as experts see them: ep consecutive ranks of a stage share out the experts,
# whatever attention does with these ranks. Experts are not cut (their "tp" is 1): those of
# fine-grained models are narrow already, and whole ones keep their matrix products large
# (Megatron-Core's own advice, its MoE README, "Expert tensor parallelism").
_EXPERT_DIMENSIONS = ["tp", "ep", "dp", "pp"]
NCCL_TIMEOUT = timedelta(minutes=15)


@dataclass(frozen=True)
class Mesh:
    """One layout over all ranks: its process groups and this rank's place in it."""

    layout: LayoutConfig
    pg: Any
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    cp_size: int
    cp_rank: int
    dp_size: int
    dp_rank: int
    ep_size: int
    ep_rank: int

    @property
    def in_first_model_parallel_group(self) -> bool:
        """Whether this rank is one of the first that together hold the whole model (stream_hf's
        group)."""
        rank = (self.dp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank
        return rank < max(self.tp_size, self.ep_size)

    def dp_rank_of(self, rank: int) -> int:
        """The data-parallel rank that another rank of the world has."""
        return rank // (self.tp_size * self.cp_size) % self.dp_size

    def cp_rank_of(self, rank: int) -> int:
        """The context-parallel rank that another rank of the world has."""
        return rank // self.tp_size % self.cp_size

    def reporter(self, dp_rank: int, cp_rank: int = 0) -> int:
        """The world rank that has the outputs of a data-parallel rank's samples, or of the part of
        them that a context-parallel rank computes: an output rank."""
        stage = (self.pp_size - 1) * self.dp_size
        return ((stage + dp_rank) * self.cp_size + cp_rank) * self.tp_size

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the model's head."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank contributes its stage's outputs: one tensor-parallel rank of the last
        stage."""
        return self.is_last_stage and self.tp_rank == 0


def check_layout(layout: LayoutConfig, world_size: int, name: str) -> None:
    """Raises BadInput where the ranks of a replica do not divide the world, or the experts' ranks a
    stage."""
    if world_size % layout.model_size:
        raise BadInput(
            f"{name}.layout: tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = "
            f"{layout.model_size} ranks a replica do not divide the {world_size} ranks of the run: "
            f"change {name}.layout or cluster.ranks"
        )
    if world_size // layout.pp % layout.ep:
        raise BadInput(
            f"{name}.layout.ep={layout.ep} does not divide the {world_size // layout.pp} ranks of "
            f"a pipeline stage ({world_size} ranks, pp {layout.pp}): change {name}.layout or "
            "cluster.ranks"
        )


def check_model_layout(spec: ModelSpec, layout: LayoutConfig, name: str) -> None:
    """Raises BadInput if the layout cannot shard the model; name is the config section."""
    for part, count in (
        ("attention heads", spec.attention.num_heads),
        ("key-value heads", spec.attention.num_kv_heads),
        *(("key heads of delta nets", net.key_heads) for net in spec.delta_nets),
        # Experts are whole on their ranks.
        *(("MLP columns", size) for size in spec.mlp_sizes),
    ):
        if count % layout.tp:
            raise BadInput(
                f"{name}.layout.tp={layout.tp} does not divide the model's {count} {part}: choose "
                "a divisor"
            )
    for net in spec.delta_nets:
        if net.key_heads // layout.tp % layout.cp:
            raise BadInput(
                f"{name}.layout: tp {layout.tp} x cp {layout.cp} = {layout.tp * layout.cp} ranks "
                f"do not divide the {net.key_heads} key heads of delta nets, which they share: "
                "choose a divisor"
            )
    stages = layout.pp * (layout.vpp or 1)
    if stages > spec.num_layers:
        raise BadInput(
            f"{name}.layout: pp {layout.pp} x vpp {layout.vpp or 1} = {stages} stages are more "
            f"than the model's {spec.num_layers} layers: choose a smaller pp, or vpp"
        )
    if layout.ep > 1 and not spec.num_experts:
        raise BadInput(
            f"{name}.layout.ep={layout.ep}: a {spec.family} model has no experts, leave ep out"
        )
    if spec.num_experts % layout.ep:
        raise BadInput(
            f"{name}.layout.ep={layout.ep} does not divide the model's {spec.num_experts} experts: "
            "choose a divisor"
        )
    if spec.num_experts and layout.tp > 1 and not layout.sequence_parallel:
        raise BadInput(
            f"{name}.layout.sequence_parallel=false with tp={layout.tp}: each token would go "
            "through its experts once for every tensor-parallel rank, set it to true"
        )


def stage_pieces(spec: ModelSpec, layout: LayoutConfig) -> list[range]:
    """Layers of each piece of a pipeline, as indices from input to output: of pp x vpp pieces, the
    i-th is on stage i % pp.

    Where they do not divide the model's layers, some have one more than others. These are
    consecutive, so that the stages' totals too differ by one at most. The last piece, which has the
    head, is never among them. They end before it; in a model whose first piece would have no
    experts they begin with that piece, whose layers are the lightest.
    """
    count = layout.pp * (layout.vpp or 1)
    fewest, longer = divmod(spec.num_layers, count)
    first = count - 1 - longer
    if spec.num_experts and not any(layer.experts for layer in spec.layers[:fewest]):
        first = 0
    sizes = (fewest + (first <= index < first + longer) for index in range(count))
    bounds = [0, *itertools.accumulate(sizes)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def make_mesh(layout: LayoutConfig, name: str = "model") -> Mesh:
    """Collective over all ranks: create the groups of a layout. Raises BadInput where they do not
    divide the world."""
    from megatron.core import parallel_state
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.process_groups_config import ProcessGroupCollection

    cpu_torch.install()
    world_size = dist.get_world_size()
    backend = current_platform().backend
    timeout = group_timeout(backend)
    check_layout(layout, world_size, name)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # All that sequence parallelism still takes from Megatron's global state: a scratch buffer
        # without a layout.
        parallel_state._set_global_memory_buffer()
    sizes = [layout.tp, layout.cp, world_size // layout.model_size, layout.pp]
    expert_sizes = [1, layout.ep, world_size // (layout.ep * layout.pp), layout.pp]
    grid = HyperCommGrid(shape=sizes, dim_names=_DIMENSIONS, backend=backend)
    expert_grid = HyperCommGrid(shape=expert_sizes, dim_names=_EXPERT_DIMENSIONS, backend=backend)

    def group(*dimensions: str, of: Any = grid) -> Any:
        return of.create_pg(
            list(dimensions) if len(dimensions) > 1 else dimensions[0], timeout=timeout
        )

    pg = ProcessGroupCollection()
    pg.tp, pg.cp, pg.dp, pg.pp = (group(d) for d in _DIMENSIONS)
    pg.mp = group("tp", "pp")
    pg.tp_cp = group("tp", "cp")
    pg.dp_cp = group("cp", "dp")
    pg.tp_dp_cp = group("tp", "cp", "dp")
    pg.expt_tp, pg.ep, pg.expt_dp = (group(d, of=expert_grid) for d in ("tp", "ep", "dp"))
    pg.tp_ep = group("tp", "ep", of=expert_grid)
    pg.tp_ep_pp = group("tp", "ep", "pp", of=expert_grid)
    pg.intra_dp_cp = pg.dp_cp
    pg.intra_expt_dp = pg.expt_dp
    pg.inter_dist_opt = None
    pg.intra_dist_opt = dist.group.WORLD
    pg.hcp = None
    pg.embd, pg.pos_embd = _embedding_groups(grid.get_rank_enum("pp"), backend)
    sizes_and_ranks = {
        f"{name}_{kind}": getattr(getattr(pg, name), kind)()
        for name in ("tp", "pp", "cp", "dp", "ep")
        for kind in ("size", "rank")
    }
    return Mesh(layout=layout, pg=pg, **sizes_and_ranks)


def world_timeout() -> timedelta:
    """Timeout of the world's collectives; new groups otherwise have torch's default."""
    world: Any = dist.group.WORLD
    timeout: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    return timeout


def group_timeout(backend: str) -> timedelta:
    """Timeout of collectives in a model's groups. All ranks enter NCCL's within minutes; waits that
    take hours (a rollout) are in the world, over gloo."""
    return min(world_timeout(), NCCL_TIMEOUT) if backend == "nccl" else world_timeout()


def shorten_nccl_waits() -> None:
    """Set the same timeout for the world's collectives over NCCL, if it has any."""
    if current_platform().backend == "nccl":
        world: Any = dist.group.WORLD
        world._get_backend(current_platform().device)._set_default_timeout(group_timeout("nccl"))


def _embedding_groups(pipelines: list[list[int]], backend: str) -> tuple[Any, Any]:
    """Groups of the first and last stage (tied word embeddings) and of the first alone, this rank's
    or None."""
    word = position = None
    for ranks in pipelines:
        ends = [ranks[0], ranks[-1]] if len(ranks) > 1 else ranks
        ends_group = dist.new_group(ends, timeout=group_timeout(backend), backend=backend)
        first_group = dist.new_group(ranks[:1], timeout=group_timeout(backend), backend=backend)
        if dist.get_rank() in ends:
            word = ends_group
        if dist.get_rank() == ranks[0]:
            position = first_group
    return word, position
