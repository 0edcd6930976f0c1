"""An actor and engines that it feeds, on every rank, for tests of weight syncs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vapo_megatron.config.model import ActorConfig, LayoutConfig, ModelConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.load import load_hf

Body = Callable[[EnginePool, EngineWeights, Trainable], Any]


def with_engines(
    model_dir: Path, log_dir: Path, layout: LayoutConfig, config: RolloutConfig, body: Body
) -> Any:
    """Collective: what body returns, given the engines of a run and its actor, in float32."""
    spec = read_spec(model_dir)
    mesh = make_mesh(layout)
    model = ModelConfig(path=str(model_dir), dtype="float32")
    actor = Trainable(spec, model, ActorConfig(layout=layout), mesh, "lm", name="actor", seed=1)
    load_hf(actor.chunks, spec, model_dir, mesh, "lm")
    actor.prepare()
    with (
        EnginePool(config, model_dir, "float32", log_dir) as engines,
        EngineWeights(engines, config, "float32") as weights,
    ):
        engines.start()
        engines.wait_until_ready()
        return body(engines, weights, actor)
