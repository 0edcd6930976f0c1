"""The rollout side of a run: prompts go to the engines, responses come back and are graded."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.agents.episodes import Agents, episode_metrics, is_whole
from vapo_megatron.agents.processes import AgentProcesses, open_agents
from vapo_megatron.algorithms.selection import informative_groups
from vapo_megatron.checkpoint.manifest import GROUPS_FILE
from vapo_megatron.checkpoint.resume import Resumed
from vapo_megatron.collectives import broadcast_value, on_rank_zero
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.prompts import PromptSource, eval_prompts, train_prompts
from vapo_megatron.data.sample import GRADED_BY_AGENT, Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.engines.weight_sync.logprob_difference import prompt_sequences, sequences_of
from vapo_megatron.evaluation.evaluator import Generate, generate_with
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rewards.grading import copied_share, failed_share, grade_samples
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import DROPPED, FILLED, NO_SIGNAL, Ledger, StepRule
from vapo_megatron.rollout.packed_groups import unpack_groups
from vapo_megatron.rollout.request import GenerationRequest, GroupRequest
from vapo_megatron.rollout.stream import GroupStream, Work
from vapo_megatron.signals import stop_requested
from vapo_megatron.training.user_functions import mask_tokens
from vapo_megatron.weights.routed_experts import ExpertChoices


def age_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Ages of tokens, in weight syncs since the weights that drew them, and the share of tokens of
    each.

    version: of the weights that are about to be trained.
    """
    tokens: Counter[int] = Counter()
    for sample in samples:
        trained = int(sample.written[: sample.window_start or 0].sum())  # in earlier steps
        for drawn_by, count in sample.versions:
            if count > trained:
                tokens[version - drawn_by] += count - trained
            trained = max(0, trained - count)
    total = tokens.total()
    row = {f"rollout/age_{age}_share": count / total for age, count in sorted(tokens.items())}
    mean = sum(age * count for age, count in tokens.items()) / total
    return row | {"rollout/age_mean": mean, "rollout/age_max": float(max(tokens))}


class Waits:
    """Times between one step's groups and the next one's."""

    def __init__(self) -> None:
        self._taken_at: float | None = None
        self._busy = 0.0

    def row(
        self, asked_at: float, tokens: int, engines: int, dispatcher: Dispatcher, ledger: Ledger
    ) -> dict[str, float]:
        """Called when a step has just taken its groups: idle shares since the last call, and work
        in flight.

        asked_at: when the trainer began to wait for them, by the dispatcher's clock. tokens: of
            their responses.
        engines: their number.
        """
        now = dispatcher.loop.time()
        busy = dispatcher.busy_seconds()
        row = {
            "throughput/queued_groups": float(ledger.graded),
            "throughput/groups_in_flight": float(ledger.in_flight),
        }
        if self._taken_at is not None:
            seconds = now - self._taken_at
            row["throughput/trainer_idle"] = (now - asked_at) / seconds
            row["throughput/engines_idle"] = 1 - (busy - self._busy) / (seconds * engines)
            # Engines have generated all the time, not only while they were waited for
            if ledger.rule.staleness:
                row[names.ROLLOUT_SPEED] = tokens / seconds
        self._taken_at = now
        self._busy = busy
        return row


@dataclass
class Rollouts:
    """The source of graded samples. prompts, evaluation_prompts and verifier are on rank 0 alone.

    Attributes:
        seed: run seed; response seeds are derived from it.
        routed_experts: the experts that engines report; None where they are not requested.
        prompts: the training prompts, in drawing order.
        probe: sequences of token ids on which engines and trainer are compared after a weight sync.
        stream: the training groups; None outside begin()/end().
        saved: the state of the training stream in the checkpoint of a resumed run.
        is_interruptible: whether a signal to stop ends take().
        agents: whose episodes are trained and evaluated; None: responses of the engines, or not
            started yet.
        agent_settings: of rollout.agent, on rank 0; None without one.
        mask_function: of algorithm.mask_function; None without one.
        engine_failures: number of engine failures since the last step's weight sync.
    """

    engines: EnginePool
    engine_weights: EngineWeights
    tokenizer: TextTokenizer
    sampling: SamplingConfig
    reward: RewardConfig
    seed: int
    routed_experts: ExpertChoices | None = None
    verifier: VerifierPool | None = None
    prompts: PromptSource | None = None
    evaluation_prompts: Sequence[Sequence[Prompt]] = ()
    probe: list[list[int]] = field(default_factory=list)
    stream: GroupStream | None = None
    saved: tuple[dict[str, Any], dict[int, list[Sample]]] | None = None
    is_interruptible: bool = False
    agents: Agents | AgentProcesses | None = None
    agent_settings: RolloutConfig | None = None
    mask_function: str | None = None
    engine_failures: int = 0
    _fixed_policy: bool = False
    _counted: Counter[str] = field(default_factory=Counter)
    _waits: Waits = field(default_factory=Waits)
    _dispatcher: Dispatcher | None = None

    @property
    def dispatcher(self) -> Dispatcher:
        """On rank 0: the client of all engines."""
        assert self._dispatcher is not None, "use() comes first"
        return self._dispatcher

    def use(self, dispatcher: Dispatcher) -> None:
        """On rank 0, once the engines are ready: draw responses through this dispatcher."""
        self._dispatcher = dispatcher

    def begin(
        self, rule: StepRule, samples_per_prompt: int, step: int, fixed_policy: bool = False
    ) -> None:
        """Collective: what take() collects from now on, from the step after `step`.

        fixed_policy: the policy is not trained on them. Then groups without signal are useful as
            well, engines with separate devices work ahead, and their experts are not requested
            (rollout.router_replay).
        """
        if self.prompts is None:
            return
        self._fixed_policy = fixed_policy
        if fixed_policy and not self.engines.share_device:
            rule = replace(rule, staleness=rule.steps)
        if fixed_policy:
            experts = None
        else:
            experts = self.routed_experts
        goes_on = rule.any_order or self.engine_weights.sync_mode != "wait"
        if self.agent_settings is None:
            longest = self.sampling.max_new_tokens
        else:
            longest = self.agent_settings.episode.max_turns
        if rule.windows == 1:
            window = None
        else:
            window = -(-longest // rule.windows)
        dispatcher = self.dispatcher
        prompts = self.prompts

        def request(prompt: Prompt) -> GroupRequest:
            limit = self.sampling.max_new_tokens
            version = self.engine_weights.version
            return GroupRequest(
                prompt,
                samples_per_prompt,
                self.sampling,
                limit,
                self.seed,
                version,
                experts,
                goes_on=goes_on,
                window=window,
            )

        def is_useful(group: Sequence[Sample]) -> bool | None:
            if is_whole(group):
                return rule.most_draws is None or has_signal(group)
            return None

        self._open_agents()
        if self.agents is None:
            generate = None
        else:
            generate = self.agents.generate
        responses = rule.groups * samples_per_prompt
        timeout = self.engines.collect_timeout_s
        work = Work(request, self._grade, is_useful, responses, timeout, generate)
        self.stream = GroupStream(dispatcher, prompts, Ledger(rule, prompts.cursor, step), work)
        if self.saved is not None and not fixed_policy:
            self.stream.restore(*self.saved)
            self.saved = None
        self._counted = self.stream.ledger.counts.copy()

    def end(self) -> None:
        """Take nothing more. What is under way is aborted."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def generator(self, sampling: SamplingConfig, seed: int) -> Generate:
        """On rank 0: what answers evaluation sets, by episodes where agents are trained."""
        self._open_agents()
        collect = self.dispatcher.collect
        if self.agents is not None:
            collect = partial(collect, generate=self.agents.generate)
        return generate_with(
            collect, self.tokenizer.decode, sampling, seed, self.engine_weights.version, self.reward
        )

    def _open_agents(self) -> None:
        if self.agents is None and self.agent_settings is not None:
            self.agents = open_agents(self.dispatcher, self.tokenizer, self.agent_settings)

    def close_agents(self) -> None:
        """Stop the agents that were started."""
        if self.agents is not None:
            self.agents.close()
            self.agents = None

    def take(self, recorder: Recorder) -> list[Sample]:
        """On rank 0: the graded responses of the next step, in the order of group and index.

        Raises:
            StopAsked: a signal asks the run to stop.
        """
        assert self.stream is not None and self.prompts is not None and self.verifier is not None, (
            "begin() comes first"
        )
        ledger = self.stream.ledger
        clock = self.dispatcher.loop
        start = clock.time()
        with recorder.phase("rollout", total=self.stream.responses) as advance:
            groups = self.stream.take(advance, stop_requested if self.is_interruptible else None)
        self.prompts.cursor = ledger.first
        samples = [sample for group in groups for sample in group]
        tokens = sum(sample.new_tokens for sample in samples)
        recorder.add({names.ROLLOUT_SPEED: tokens / (clock.time() - start)})
        recorder.add({names.FAILED_GRADES: failed_share(samples, self.verifier)})
        if any(sample.correct for sample in samples):
            recorder.add({names.COPIED: copied_share(samples)})
        if self.agents is not None:
            whole = len(samples) + sum(map(len, self.stream.dropped))
            recorder.add(episode_metrics(samples) | self.agents.broken_metrics(whole))
        counts = ledger.counts - self._counted
        self._counted = ledger.counts.copy()
        if ledger.rule.most_draws is not None:
            trained = counts["trained"]  # groups, by outcome
            recorder.add({"dynamic_sampling/prompts": float(trained + counts[NO_SIGNAL])})
            recorder.add({"dynamic_sampling/kept": float(trained - counts[FILLED])})
        if ledger.rule.oldest:
            recorder.add(age_metrics(samples, self.engine_weights.version))
            recorder.add(
                self._waits.row(start, tokens, self.engines.count, self.dispatcher, ledger)
            )
        if ledger.rule.most_draws is not None or ledger.rule.oldest:
            recorder.add({f"rollout/dropped_{reason}": float(counts[reason]) for reason in DROPPED})
        return samples

    def prepare_sync(self, recorder: Recorder) -> None:
        """Collective: called before new weights arrive. Where results must not depend on timing,
        engines first finish their running requests."""
        if (
            self.stream is not None
            and self.stream.ledger.rule.staleness
            and self.engine_weights.sync_mode == "wait"
        ):
            with recorder.timer("wait_for_engines"):
                self.stream.wait_until_graded()

    def advance(self) -> None:
        """Collective: the engines have the weights of the step that was taken last."""
        if self.stream is not None:
            self.stream.advance()

    def state(self) -> tuple[dict[str, Any], dict[int, list[Sample]]]:
        """On rank 0, for a checkpoint: the ledger's state, and by number the groups that wait for
        the trainer, which nothing changes any more (stream.pack_groups writes them).

        Of a resumed run that has not begun, or has no step left, what its checkpoint had. Nothing
        where all is drawn again anyway: without a stream, or under a policy that does not change.
        """
        if self.stream is None and self.saved is not None:
            return self.saved
        if self.stream is None or self._fixed_policy:
            return {}, {}
        return self.stream.state()

    def generate_greedy(self, prompts: Sequence[Prompt], recorder: Recorder) -> list[Sample]:
        """On rank 0: the graded greedy response to each prompt."""
        greedy = self.sampling.model_copy(update={"temperature": 0.0})
        with recorder.phase("rollout_greedy", total=len(prompts)) as advance:
            request = GenerationRequest(prompts, 1, greedy, self.seed, self.engine_weights.version)
            samples = self.dispatcher.collect(request, advance)
        self._grade(samples)
        return samples

    def remember_probe(self, batch: ExperienceBatch | None) -> None:
        """Collective: compare engines and trainer on what the policy really writes (rank 0's batch)
        from now on."""
        self.probe = broadcast_value(None if batch is None else sequences_of(batch))

    def _grade(self, samples: Sequence[Sample]) -> None:
        assert self.verifier is not None, "responses are graded on rank 0"
        grade_samples(samples, self.verifier, self.tokenizer.decode, self.reward)
        if self.mask_function is not None:
            mask_tokens(self.mask_function, samples, self.tokenizer.decode)


def has_signal(group: Sequence[Sample]) -> bool:
    """Whether a group has both correct and incorrect responses (DAPO's dynamic sampling) or, where
    an agent gave rewards, at the end or by turns, different rewards."""
    if any(
        sample.grade_reason in GRADED_BY_AGENT or sample.turn_rewards is not None
        for sample in group
    ):
        rewards = [sample.reward or 0.0 for sample in group]
        # Sums of float32
        return not math.isclose(min(rewards), max(rewards), rel_tol=1e-5, abs_tol=1e-5)
    correct = torch.tensor([bool(sample.correct) for sample in group])
    return bool(informative_groups(correct, torch.zeros(len(group), dtype=torch.int64)).all())


def make_rollouts(
    config: TrainConfig,
    spec: ModelSpec,
    engines: EnginePool,
    engine_weights: EngineWeights,
    tokenizer: TextTokenizer,
    verifier: VerifierPool | None,
    resumed: Resumed | None,
) -> Rollouts:
    """Collective: read the prompts; a resumed run draws the next ones.

    Raises:
        BadInput: a file of prompts cannot be used, or is not the one that the run was started with.
    """
    prompts = None
    evaluation = []
    if dist.get_rank() == 0:
        evaluation = [eval_prompts(entry, config.data, tokenizer) for entry in config.data.eval]
        prompts = PromptSource(
            train_prompts(config.data, tokenizer, config.critic.privileged_field),
            config.run.seed,
            config.data.shuffle,
            config.data.weights,
        )
    if resumed is None:
        probe = broadcast_value(None if prompts is None else prompt_sequences(prompts))
    else:
        probe = [list(ids) for ids in resumed.progress.probe]
        on_rank_zero(
            lambda: prompts.restore(resumed.progress.prompts) if prompts is not None else None
        )
    rollouts = Rollouts(
        engines,
        engine_weights,
        tokenizer,
        config.sampling,
        config.reward,
        config.run.seed,
        ExpertChoices.of(spec) if config.rollout.router_replay else None,
        verifier,
        prompts,
        evaluation,
        probe,
        mask_function=config.algorithm.mask_function,
    )
    if prompts is not None and config.rollout.agent is not None:
        rollouts.agent_settings = config.rollout
    if resumed is not None and prompts is not None and resumed.progress.groups:
        graded = resumed.read(GROUPS_FILE)
        rollouts.saved = (
            resumed.progress.groups,
            unpack_groups(graded, prompts.at, tokenizer.decode) if graded else {},
        )
    return rollouts
