"""A config with all that follows from it: models, memory, time."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vapo_megatron.config.plan import EfficiencyConfig, Kind, PlanConfig
from vapo_megatron.engines.node_part import check_engine_size
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.hardware import Hardware
from vapo_megatron.operations.plan.lengths import planned_lengths
from vapo_megatron.operations.plan.memory import Memory, plan_memory
from vapo_megatron.operations.plan.models import PlannedModel, PlannedRun, planned_models, saved_models
from vapo_megatron.operations.plan.time import StepTime, plan_time


@dataclass(frozen=True)
class Saving:
    """Of one checkpoint of a run.

    Attributes:
        bytes: of all its tensors.
        waits: seconds for which training stands still: the state is put together and copied to host memory.
        writes: seconds until it is on the disk, while training goes on.
        resumes: seconds until models have it again; each byte is read and compared once. What starts a run anew
            (processes, engines) is not counted.
    """

    bytes: float
    waits: float
    writes: float
    resumes: float


def plan_saving(models: Mapping[str, PlannedModel], hardware: Hardware) -> Saving:
    """Of the models that are saved, at their layouts; what is slower counts, a rank or the file system."""
    saved = list(models.values())
    world = saved[0].world
    whole = sum(model.bytes_in_checkpoint for model in saved)
    # Of each model the fullest stage, whether or not these are of one rank.
    share = sum(max(map(model.bytes_saved, range(model.layout.pp))) for model in saved)
    held = sum(max(map(model.bytes_held, range(model.layout.pp))) for model in saved)
    copied = share / (hardware.pcie * hardware.efficiency.pcie)
    return Saving(
        bytes=whole,
        # Optimizers that sleep come to the device first; replicas hand each other what each of them saves.
        waits=2 * copied + share / hardware.link(world),
        writes=max(share / hardware.rank_save, whole / hardware.storage),
        # What one of several replicas has read goes to the others.
        resumes=max(share / hardware.rank_load, whole / hardware.storage) + (held - share) / hardware.link(world),
    )


def measured_efficiency(path: Path, kind: Kind, parameters: int, assumed: EfficiencyConfig) -> EfficiencyConfig:
    """The efficiencies of a file that `python -m benchmarks.gpu --json FILE` wrote.

    Those of the measured shape whose parameters are nearest to the model's; linear and attention keep their ratio, as a
    step was timed as a whole. What was not measured stays as it is assumed.

    Raises:
        BadInput: the file cannot be read, was made on another GPU, or has no row in BF16 that was timed.
    """
    expected = "expected what `python -m benchmarks.gpu --json FILE` writes on the GPU that is planned for"
    try:
        content = json.loads(path.read_text())
        hardware = str(content["machine"]["hardware"])
        rows = [row for row in content["rows"] if isinstance(row.get("linear"), float)]
        shapes = {row["shape"]: int(row["parameters"]) for row in rows if row["precision"] == "bf16"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"plan.gpu_benchmark={path}: cannot be read ({error!r}): {expected}") from None
    if kind.partition("-")[0].upper() not in hardware.upper():
        raise BadInput(f"plan.gpu_benchmark={path} was measured on {hardware}, hardware.kind is {kind}: {expected}")
    if not shapes:
        raise BadInput(f"plan.gpu_benchmark={path} has no timed row in bf16: {expected}")
    nearest = min(shapes, key=lambda shape: abs(shapes[shape] - parameters))
    linear: dict[str, Any] = {row["precision"]: row["linear"] for row in rows if row["shape"] == nearest}
    found = float(min(linear["bf16"], 1.0))
    fp8 = max((value for precision, value in linear.items() if precision != "bf16"), default=None)
    gain = assumed.fp8_gain if fp8 is None else min(2.0, max(1.0, fp8 / linear["bf16"]))
    attention = min(1.0, found * assumed.attention / assumed.linear)
    return assumed.model_copy(update={"linear": found, "attention": attention, "fp8_gain": gain})


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
