"""Which node runs what of an engine, and what cannot be shared out."""

import pytest

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.node_part import NodePart, check_engine_size, check_nodes, part_of_ranks
from vapo_megatron.errors import BadInput


@pytest.mark.parametrize(
    ("tp", "node_gpus", "owners"),
    [
        (2, 4, {0: (0, 1), 2: (0, 1), 4: (0, 1), 6: (0, 1)}),
        (4, 4, {0: (0, 1), 4: (0, 1)}),
        (8, 4, {0: (0, 2), 4: (1, 2)}),
        (8, 2, {0: (0, 4), 2: (1, 4), 4: (2, 4), 6: (3, 4)}),
    ],
)
def test_the_first_rank_of_an_engine_on_a_node_owns_its_part(
    tp: int, node_gpus: int, owners: dict[int, tuple[int, int]]
) -> None:
    found = {rank: part_of_ranks(rank, tp, node_gpus) for rank in range(8)}
    assert {rank: (part.index, part.of) for rank, part in found.items() if part is not None} == owners


@pytest.mark.parametrize(("tp", "gpus", "fits"), [(4, 16, True), (16, 32, True), (16, 24, False), (12, 24, False)])
def test_an_engine_has_a_part_of_a_node_or_whole_ones(tp: int, gpus: int, fits: bool) -> None:
    if fits:
        return check_engine_size(tp, 8, gpus)
    with pytest.raises(BadInput, match=rf"rollout\.tp={tp} neither divides the 8 GPUs of a node"):
        check_engine_size(tp, 8, gpus)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (NodePart(2, 2, "a:1"), "--node 2 of --nodes 2: they are counted from 0"),
        (NodePart(0, 3, "a:1"), "--nodes 3 does not divide rollout.tp=4"),
        (NodePart(1, 2), "--nodes 2 without --meet: give host:port of the first node"),
        (NodePart(0, 1, "a:1"), "--meet a:1 without --nodes"),
        (NodePart(0, 2, "a"), "--meet a is not of the form host:port"),
        (NodePart(0, 2, "a:70000"), "--meet a:70000 is not of the form host:port"),
    ],
)
def test_parts_that_cannot_be_are_refused(part: NodePart, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_nodes(4, part)


@pytest.mark.parametrize("name", ["nnodes", "node_rank", "dist_init_addr", "dp_size", "pp_size"])
def test_sizes_that_no_weight_sync_knows_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"server_args\.{name} is set by the trainer"):
        RolloutConfig(server_args={name: 2})
