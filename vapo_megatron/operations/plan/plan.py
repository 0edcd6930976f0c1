"""A config with all that follows from it: models, memory, time."""

from dataclasses import dataclass
from pathlib import Path

from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.engines.node_part import check_engine_size
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.hardware import Hardware
from vapo_megatron.operations.plan.lengths import planned_lengths
from vapo_megatron.operations.plan.measured import measured_efficiency
from vapo_megatron.operations.plan.memory import Memory, plan_memory
from vapo_megatron.operations.plan.models import PlannedRun, planned_models, saved_models
from vapo_megatron.operations.plan.saving import Saving, plan_saving
from vapo_megatron.operations.plan.time import StepTime, plan_time


@dataclass(frozen=True)
class Plan(PlannedRun):
    """What a run on `world` GPUs needs and takes.

    evaluations counts those of the whole run, evaluation_samples the responses of one.
    """

    world: int
    memory: Memory
    time: StepTime
    saving: Saving
    evaluation_samples: int
    evaluations: int

    @property
    def fits(self) -> bool:
        """Whether everything has room."""
        return not self.memory.problems

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the whole run by what they are spent on; starting and checkpoints are not among them."""
        return {
            "value pretraining": self.time.pretraining,
            "steps": self.config.run.steps * self.time.step,
            "evaluations": self.evaluations * self.time.evaluation,
        }

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the whole run."""
        return self.world * sum(self.seconds.values()) / 3600


def default_world(config: PlanConfig) -> int:
    """GPUs where the command line names none: plan.gpus, cluster.ranks, or one node."""
    return config.plan.gpus or config.cluster.ranks or config.hardware.gpus_per_node


def make_plan(config: PlanConfig, world: int, evaluation_samples: int = 0) -> Plan:
    """The plan of a config; evaluation_samples: responses of one evaluation over all sets.

    Raises:
        BadInput: the model's config.json cannot be read, or the model or the engines cannot be laid out over `world`
            GPUs as the config says. What has no room is in the plan's memory.problems.
    """
    hardware, lengths = Hardware(config.hardware), planned_lengths(config)
    models = planned_models(config, world)
    if config.rollout.external_urls:
        raise BadInput(
            "rollout.external_urls: a plan knows engines that share the GPUs of the run alone: leave it out, and "
            "what plan says of the trainer's memory is an upper bound"
        )
    check_engine_size(config.rollout.tp, min(world, hardware.gpus_per_node), world)
    if world > hardware.gpus_per_node and world % hardware.gpus_per_node:
        raise BadInput(
            f"{world} GPUs are no whole number of nodes of hardware.gpus_per_node={hardware.gpus_per_node}: choose a "
            "multiple"
        )
    if config.plan.gpu_benchmark is not None:
        parameters = models["actor"].spec.parameter_count()
        reached = measured_efficiency(Path(config.plan.gpu_benchmark), hardware.kind, parameters, hardware.efficiency)
        hardware = Hardware(config.hardware.model_copy(update={"efficiency": reached}))
    run = PlannedRun(config, models, hardware, lengths)
    memory = plan_memory(run)
    time = plan_time(run, memory.engine, evaluation_samples)
    saving = plan_saving(saved_models(config, models), hardware)
    counted = evaluation_samples, _evaluations(config)
    return Plan(config, models, hardware, lengths, world, memory, time, saving, *counted)


def _evaluations(config: PlanConfig) -> int:
    """Evaluations of a run: before it if asked for, every so many steps, and after the last step."""
    if not config.data.eval:
        return 0
    every, steps = config.evaluation.every, config.run.steps
    during = 1 if every is None else -(-steps // every)
    return during + int(config.evaluation.before_training)
