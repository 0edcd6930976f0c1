"""The models of a run: actor, critic and reference policy, their sources, and the memory that they
share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from vapo_megatron.checkpoint.resume import Resumed, SavedModel
from vapo_megatron.collectives import on_rank_zero
from vapo_megatron.config.policy import KlConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.megatron.mesh import Mesh, make_mesh
from vapo_megatron.megatron.offload import ONLOADED, MemoryPlan, Offloader, Residency
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.probe import PROBE_FILE, Probe
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import Head
from vapo_megatron.training.skipped_updates import SkippedUpdates
from vapo_megatron.weights.load import load_hf


@dataclass
class Models:
    """The models of a run, as this rank holds them.

    Attributes:
        actor: the policy.
        critic: None for algorithms without one.
        reference: the policy that the KL penalty keeps the actor near to; None without such a
            penalty.
        has_base_as_reference: whether it is the actor without its adapters, and no third model.
        sources: the Hugging Face directory that each model started from, by name.
        saves_reference: whether the reference is replaced during the run, and therefore saved in
            checkpoints.
        base: the frozen weights that actor and critic share, or None.
        shares_device: with engines, for which models leave the device while responses are written.
        reads_entropies: whether values are regressed on the policy's entropies, for which it is
            scored in every step.
        served: the actor's weights as engines have them, where groups that are drawn are still to
            be written by these when the actor has newer ones; in host memory.
        updates: judges their optimizer updates.
        stays: what there is room for on the device in each phase.
        memory: which parts of them are on the device in each phase.
    """

    actor: Trainable
    critic: Trainable | Probe | None = None
    reference: Trainable | None = None
    has_base_as_reference: bool = False
    sources: Mapping[str, Path] = field(default_factory=dict)
    saves_reference: bool = False
    base: Offloader | None = None
    shares_device: bool = True
    reads_entropies: bool = False
    served: list[Tensor] | None = None
    stays: Residency = field(default_factory=lambda: ONLOADED)
    memory: MemoryPlan = field(init=False)
    updates: SkippedUpdates = field(init=False, default_factory=SkippedUpdates)

    def __post_init__(self) -> None:
        every = {
            model.name: model.offloader
            for model in (*self.trained, self.reference)
            if model is not None
        }
        if self.base is not None:
            every["base"] = self.base
        free_bytes = current_platform().free_bytes
        self.memory = MemoryPlan(every, self.shares_device, self.stays, free_bytes)

    @property
    def trained(self) -> list[Trainable]:
        """Actor, and critic where that is a model."""
        if self.critic is None or isinstance(self.critic, Probe):
            return [self.actor]
        return [self.actor, self.critic]

    @property
    def probe(self) -> Probe | None:
        """The critic where it is no model."""
        if isinstance(self.critic, Probe):
            return self.critic
        return None

    def judge_updates(self, updates: SkippedUpdates) -> None:
        """Have all updates of the models judged before they are made."""
        self.updates = updates
        for model in (self.actor, self.critic):
            if model is not None:
                model.accepts = updates.accepts

    @property
    def critic_is_new(self) -> bool:
        """Whether there is a critic that has made no update, in no attempt of the run."""
        return self.critic is not None and self.critic.updates == 0

    def saved(self) -> dict[str, SavedModel]:
        """The models that a checkpoint holds, by the name of their folder."""
        models = [*self.trained, self.reference] if self.saves_reference else self.trained
        return {
            model.name: SavedModel(model, self.sources[model.name])
            for model in models
            if model is not None
        }


def load_models(
    config: TrainConfig, resumed: Resumed | None, stays: Residency = ONLOADED
) -> Models:
    """Collective: build the models that the algorithm asks for, with weights of Hugging Face
    directories, or of the checkpoint that the run resumes from, if it holds them. They are
    offloaded afterwards."""
    algorithm = config.algorithm
    meshes = dict[str, Mesh]()
    models: dict[str, Trainable] = {}
    for name in config.sources:
        models[name] = load_model(name, config, resumed, meshes, models.get("actor"))
    base = models["actor"].base
    models["actor"].offloader.onload_only()
    if base is not None:
        base.onload_only()
    critic: Trainable | Probe | None = models.get("critic")
    if config.has_probe:
        section = config.critic
        outputs = algorithm.value_loss.outputs
        critic = Probe(
            section,
            models["actor"].spec.hidden_size,
            outputs,
            section.head_init_std,
            config.run.seed,
        )
        if section.probe.layer is not None:
            models["actor"].tap(section.probe.layer)
        if config.critic.init_path is not None:
            critic.start_from(Path(config.critic.init_path))
        if resumed is not None and (state := on_rank_zero(partial(resumed.read, PROBE_FILE))):
            critic.load(state)
    return Models(
        models["actor"],
        critic,
        models.get("reference"),
        has_base_as_reference=algorithm.uses_reference and "reference" not in models,
        sources={name: source for name, (_, source) in config.sources.items()},
        saves_reference=algorithm.saves_reference,
        base=base,
        stays=stays,
        shares_device=not config.rollout.external_urls,
        reads_entropies=config.reads_policy_outputs and not config.has_probe,
    )


def load_model(
    name: str,
    config: TrainConfig,
    resumed: Resumed | None,
    meshes: dict[str, Mesh],
    actor: Trainable | None = None,
) -> Trainable:
    """Collective: one of the models, as load_models has it. meshes: those that there are already,
    by layout."""
    model = _build(name, config, meshes)
    if name == "critic" and actor is not None and config.shares_base:
        model.share_base(actor)
    resumes = resumed is not None and name in resumed.manifest.models
    if not resumes or model.adapter is not None:  # of which a checkpoint has adapters alone
        _read_weights(model, config)
    if name == "reference":
        model.freeze()
    else:
        model.prepare(without_attention=name == "critic" and config.critic.freeze_attention)
    if resumed is not None and resumes:
        resumed.load(model, name)
    # Shared before anything is offloaded: the actor's frozen weights would get a second place in
    # host memory.
    if name != "actor" or not config.shares_base:
        model.offloader.onload_only()
    return model


def load_frozen(name: str, config: TrainConfig) -> Trainable:
    """Collective: the actor or the critic with the weights that the config names, to score with: no
    optimizer."""
    model = _build(name, config, {})
    _read_weights(model, config)
    model.freeze()
    return model


def replace_reference(models: Models, config: KlConfig, step: int) -> None:
    """The policy of every kl.replace_reference_every-th step becomes the reference (DeepSeek-R1,
    arXiv 2501.12948)."""
    every = config.replace_reference_every
    if models.reference is not None and every is not None and step % every == 0:
        models.memory.enter("replace_reference")
        models.reference.copy_from(models.actor)


def _build(name: str, config: TrainConfig, meshes: dict[str, Mesh]) -> Trainable:
    section = config.trainable(name)
    spec = read_spec(config.sources[name][1], value_outputs=config.algorithm.value_loss.outputs)
    key = section.layout.model_dump_json()
    if key not in meshes:
        meshes[key] = make_mesh(section.layout, name)
    head: Head = "value" if name == "critic" else "lm"
    temperature = config.sampling.temperature
    return Trainable(
        spec,
        config.model,
        section,
        meshes[key],
        head,
        name=name,
        seed=config.run.seed,
        temperature=temperature,
    )


def _read_weights(model: Trainable, config: TrainConfig) -> None:
    load_hf(
        model.chunks,
        model.spec,
        config.sources[model.name][1],
        model.mesh,
        model.head,
        value_head="saved" if model.name == "critic" and config.critic.init != "policy" else "new",
        head_init_std=config.critic.head_init_std,
        seed=config.run.seed,
    )
