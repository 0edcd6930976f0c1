"""Which parts of each model are on the GPU in which phase of a step; from the trainer's own memory plan."""

from vapo_megatron.config.model import TrainableConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.megatron.memory_plan import ONLOADED, Phase
from vapo_megatron.megatron.offload import PARTS, Part

# The phases of a step in the order of training/loop.py, and the model that computes in each.
PHASES: dict[Phase, str | None] = {
    "rollout": None,
    "score_reference": "reference",
    "score_policy": "actor",
    "score_values": "critic",
    "update_critic": "critic",
    "update_policy": "actor",
    "weight_sync": None,
}
# Phases in which the engines hold all of their memory, or at least their weights.
ENGINE_ONLOADED: tuple[Phase, ...] = ("rollout",)
ENGINE_WEIGHTS: tuple[Phase, ...] = ("rollout", "weight_sync")


def on_device(phase: Phase, name: str, config: TrainableConfig) -> tuple[Part, ...]:
    """The parts of a model that are on the GPU in a phase; all that it has where it never sleeps (a reference does)."""
    if config.offload == "never" and name != "reference":
        return PARTS
    held = ONLOADED[phase].get(name, frozenset())
    return tuple(part for part in PARTS if part in held)


def phases_of(config: TrainConfig) -> list[Phase]:
    """The phases that a step of this config has."""
    models = {"actor"} | ({"critic"} if config.algorithm.uses_critic else set())
    models |= {"reference"} if config.algorithm.uses_reference else set()
    found = [phase for phase, worker in PHASES.items() if worker is None or worker in models]
    if config.algorithm.update_gives_logprobs(config.samples, config.batch.prompts_per_step):
        found.remove("score_policy")
    return found
