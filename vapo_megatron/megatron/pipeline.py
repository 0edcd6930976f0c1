"""A pipeline's pieces in Megatron's form."""

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout


class PipelinePieces(PipelineParallelLayerLayout):
    """TransformerConfig.pipeline_model_parallel_layout of any pieces (megatron/mesh.py,
    stage_pieces).

    Megatron's layers ask it for their place without saying on which stage they are: it takes that
    from global state, which knows one pipeline a process. Here each model's config has an object of
    its own, and build_model sets its stage.
    """

    def __init__(self, pieces: Sequence[range], stages: int) -> None:
        layers = [[LayerType.decoder] * len(piece) for piece in pieces]
        layers[0].insert(0, LayerType.embedding)
        layers[-1].append(LayerType.loss)
        super().__init__(layers, stages)
        self._pieces = pieces
        self.stage = 0

    def piece(self, vp_stage: int | None) -> range:
        """Layers of a chunk on this rank; vp_stage: which of them, None where there is one."""
        return self._pieces[(vp_stage or 0) * self.pipeline_model_parallel_size + self.stage]

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: Any = None,
    ) -> int:
        """As Megatron's."""
        assert layer_type == LayerType.decoder and pp_rank in (None, self.stage)
        return len(self.piece(vp_stage))

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: Any = None,
    ) -> int:
        """As Megatron's."""
        assert layer_type == LayerType.decoder and pp_rank in (None, self.stage)
        return self.piece(vp_stage).start
