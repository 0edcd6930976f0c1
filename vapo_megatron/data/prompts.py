"""The prompts of a run: a data set, tokenized, and the order in which it is drawn."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from vapo_megatron.config.data import DataConfig, EvalSet, ProblemsConfig
from vapo_megatron.data.prompt_tokens import prompt_token_ids
from vapo_megatron.data.rows import Problem, eval_problems, train_problems
from vapo_megatron.data.sample import Prompt
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput


def train_prompts(
    config: DataConfig, tokenizer: TextTokenizer, privileged: str | None = None
) -> list[Prompt]:
    """The training prompts in the order of the file, their cursors 0. privileged:
    critic.privileged_field.

    Raises BadInput for what read_problems refuses and for a prompt longer than
    config.max_prompt_tokens (which is left out instead under config.drop_long_prompts, unless none
    remains).
    """
    problems = train_problems(config, privileged)
    ids = prompt_token_ids(problems, tokenizer)
    prompts = [
        _prompt(problem, problem.source, *both)
        for problem, *both in zip(problems, *ids, strict=True)
    ]
    if config.drop_long_prompts:
        short = [prompt for prompt in prompts if len(prompt.token_ids) <= config.max_prompt_tokens]
        if left := {prompt.source for prompt in prompts} - {prompt.source for prompt in short}:
            raise BadInput(
                f"{', '.join(sorted(left))}: every prompt is longer than "
                f"data.max_prompt_tokens={config.max_prompt_tokens}; raise it"
            )
        return short
    _refuse_long(prompts, problems, config, "set data.drop_long_prompts=true")
    return prompts


def eval_prompts(
    evaluation: EvalSet,
    config: ProblemsConfig,
    tokenizer: TextTokenizer | None,
    privileged: str | None = None,
) -> list[Prompt]:
    """The prompts of one evaluation set in the order of its file, their cursors 0; without
    tokenizer, without tokens.
    privileged: critic.privileged_field, where the critic reads them too.

    Raises BadInput as train_prompts does; evaluation problems are never left out.
    """
    problems = eval_problems(evaluation, config.fields, privileged)
    none: list[tuple[int, ...]] = [()] * len(problems)
    ids = prompt_token_ids(problems, tokenizer) if tokenizer else (none, none)
    prompts = [
        _prompt(problem, evaluation.name, *both)
        for problem, *both in zip(problems, *ids, strict=True)
    ]
    _refuse_long(prompts, problems, config, "remove the row")
    return prompts


def _prompt(
    problem: Problem, source: str, ids: tuple[int, ...], privileged: tuple[int, ...]
) -> Prompt:
    extra = problem.extra
    reward = problem.reward
    return Prompt(
        problem.id,
        problem.problem,
        problem.answer,
        ids,
        0,
        source,
        extra,
        reward,
        privileged,
        problem.before,
    )


def _refuse_long(
    prompts: Sequence[Prompt], problems: Sequence[Problem], config: ProblemsConfig, instead: str
) -> None:
    for prompt, problem in zip(prompts, problems, strict=True):
        if len(prompt.token_ids) > config.max_prompt_tokens:
            raise BadInput(
                f"{problem.place}: the prompt of row {prompt.id} has {len(prompt.token_ids)} "
                f"tokens, more than data.max_prompt_tokens={config.max_prompt_tokens}; raise it, "
                f"or {instead}"
            )


class PromptSource:
    """An endless sequence of prompts: every epoch is a permutation of all of them, drawn from seed
    and epoch.

    With the weights of several sources, each source has its own epochs, and of the first n draws
    each source has its share of n, give or take one per source. The prompt at a cursor depends on
    the prompts, their weights, the seed and the cursor alone, not on how they were taken.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool = True,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if not prompts:
            raise ValueError("no prompts")
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._weights = dict(weights or {})
        whole = sum(self._weights.values())
        self._shares = [weight / whole for weight in self._weights.values()] or [1.0]
        sources = [[p for p in prompts if p.source == source] for source in self._weights]
        self._sources = sources or [self._prompts]
        self._orders: list[tuple[int, list[int]]] = [(-1, []) for _ in self._sources]
        self._drawn = [0] * len(self._sources)
        # For every cursor: its source, and how often the source was drawn
        self._places: list[tuple[int, int]] = []
        self.cursor = 0

    def __len__(self) -> int:
        """Prompts an epoch."""
        return len(self._prompts)

    def at(self, cursor: int) -> Prompt:
        """The prompt with this number in the run, counted from 0, whether or not it was drawn
        before."""
        return replace(self._at(cursor), cursor=cursor)

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as plain JSON values."""
        return {
            "cursor": self.cursor,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises BadInput if seed, order or prompts differ from the state's: the run would see
        another sequence.
        """
        for key, value in self.state().items():
            if key != "cursor" and state[key] != value:
                raise BadInput(
                    f"data: {key} is {value} and was {state[key]} in the checkpoint; "
                    "resume with the data, template and seed that the run was started with"
                )
        self.cursor = int(state["cursor"])

    def _at(self, cursor: int) -> Prompt:
        source, drawn = self._place(cursor)
        epoch, position = divmod(drawn, len(self._sources[source]))
        if epoch != self._orders[source][0]:
            order = list(range(len(self._sources[source])))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}" + (f"/{source}" if source else "")).shuffle(
                    order
                )
            self._orders[source] = epoch, order
        return self._sources[source][self._orders[source][1][position]]

    def _place(self, cursor: int) -> tuple[int, int]:
        if not self._weights:
            return 0, cursor
        # Whose turn it is: the source that is furthest behind its share
        while len(self._places) <= cursor:
            draws = len(self._places) + 1
            behind = [
                share * draws - drawn
                for share, drawn in zip(self._shares, self._drawn, strict=True)
            ]
            source = behind.index(max(behind))
            self._places.append((source, self._drawn[source]))
            self._drawn[source] += 1
        return self._places[cursor]

    @cached_property
    def _fingerprint(self) -> str:
        # Asked for at every safe point: a million prompts take seconds.
        digest = hashlib.sha256(repr(self._weights).encode() if self._weights else b"")
        for prompt in self._prompts:
            digest.update(repr((prompt.id, prompt.answer, prompt.token_ids)).encode())
            if prompt.extra:
                digest.update(repr(prompt.extra).encode())
            digest.update(prompt.reward.encode())
            digest.update(repr(prompt.privileged_ids).encode() if prompt.privileged_ids else b"")
        return digest.hexdigest()[:16]
