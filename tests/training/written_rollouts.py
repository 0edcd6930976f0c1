"""The rollout side of a run without engines: responses follow from the prompt's cursor, grades from
their text."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.loop_thread import LoopThread
from vapo_megatron.rewards.math import Grade
from vapo_megatron.rewards.pool import Case
from vapo_megatron.rollout.progress import Progress
from vapo_megatron.rollout.request import GenerationRequest, GroupRequest
from vapo_megatron.training.rollouts import Rollouts

RIGHT = 1
WRONG = 2
CUT = 3
END = 4
# Tokens of the responses to the prompt at each cursor; a response that does not stop is CUT off.
Script = Callable[[int], Sequence[Sequence[int]]]


class WrittenEngines:
    """Answers requests from a script, and remembers them."""

    version = 0
    kv_cache_offloaded = True
    share_device = True
    collect_timeout_s = 60.0
    sync_mode = "wait"
    failure: None = None

    def __init__(self, script: Script) -> None:
        self.script = script
        self.loop = LoopThread()
        self.progress = Progress()
        self.requests: list[GroupRequest] = []

    async def generate(self, group: GroupRequest) -> list[Sample]:
        """The later of two groups comes first."""
        self.requests.append(group)
        await asyncio.sleep(0.002 if group.prompt.cursor % 2 else 0.004)
        return self.written(group)

    def written(self, group: GroupRequest) -> list[Sample]:
        found = []
        for index, ids in enumerate(self.script(group.prompt.cursor)[: group.samples]):
            reason: Any = "length" if CUT in ids else "stop"
            version = group.weight_version
            found.append(
                Sample(
                    group.prompt,
                    group.group,
                    index,
                    0,
                    ids,
                    [-1.0] * len(ids),
                    reason,
                    version,
                    version,
                )
            )  # type: ignore[arg-type]
        return found

    def wait(self, work: "Future[Any]") -> Any:
        return work.result()

    def rank0_uses_engines(self) -> AbstractContextManager[None]:
        return nullcontext()

    def collect(self, request: GenerationRequest, on_done: Callable[[int], None]) -> list[Sample]:
        self.requests += request.groups()
        on_done(request.num_samples)
        return [sample for group in request.groups() for sample in self.written(group)]

    def offload(self) -> None:
        """There is nothing to make room for."""


class WordVerifier:
    """Every response that holds RIGHT is correct, cut off or not; the score is the config's."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.seen = 0

    def grade_batch(self, cases: Sequence[Case], on_done: Callable[..., None]) -> list[Grade]:
        self.seen += len(cases)
        right = [str(RIGHT) in case.response.split() for case in cases]
        scores = [self.config.correct if correct else self.config.incorrect for correct in right]
        return [
            Grade(ok, "equal" if ok else "different", score=s)
            for ok, s in zip(right, scores, strict=True)
        ]


class WordTokenizer:
    longest_token = 10
    chat_template = "{{ messages[0].content }}"

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def write_rollouts(
    script: Script, prompts: int = 1000, reward: RewardConfig | None = None
) -> Rollouts:
    """reward: correct and incorrect, 1 and -1 unless said otherwise. Prompts are drawn in their
    order."""
    reward = reward or RewardConfig()
    source = PromptSource(
        [Prompt(str(n), "", "", (n % 100, 7)) for n in range(prompts)], seed=1, shuffle=False
    )
    engines = WrittenEngines(script)
    parts: dict[str, Any] = {
        "engines": engines,
        "engine_weights": engines,
        "tokenizer": WordTokenizer(),
    }
    sampling = SamplingConfig(max_new_tokens=24)
    rollouts = Rollouts(
        **parts,
        sampling=sampling,
        reward=reward,
        seed=1,
        verifier=WordVerifier(reward),  # type: ignore[arg-type]
        prompts=source,
    )
    rollouts.use(engines)  # type: ignore[arg-type]
    return rollouts


def serve_with(rollouts: Rollouts, engines: WrittenEngines) -> None:
    """Have these engines answer from now on."""
    stand_in: Any = engines
    rollouts.engines = stand_in
    rollouts.engine_weights = stand_in
    rollouts.use(stand_in)
