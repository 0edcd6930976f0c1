"""Responses that were drawn and graded earlier, as value pretraining learns from them
(value_pretraining.from).

Rows of jsonl: this project's samples and evaluations, verl's rollout dumps (input, output, score),
{prompt, response, result}, traces of verifiers and prime-rl; slime's rollout dumps (.pt) and TRL's
completions (.parquet, data/foreign_records.py). Nothing is guessed: a record that lacks anything
needed is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.config.verifiers import LARGEST_REWARD, VERIFIERS
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.foreign_records import (
    PROMPT_MESSAGES,
    PROMPT_TEXT,
    parquet_rows,
    refuse_binary,
    slime_rows,
    translated,
)
from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.data.prompts import train_prompts
from vapo_megatron.data.rows import privileged_text
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput

KEY = "value_pretraining.from"
# Files to read in a directory: responses from before a run's first update; all of an evaluation;
# other files.
_PLACES = (
    ("evaluation/step_000000_*.jsonl", "samples/step_000000.jsonl", "samples/step_000001*.jsonl"),
    ("evaluation/*.jsonl",),
    ("*.jsonl", "*.jsonl.gz", "*.pt", "*.parquet"),
)


def record_files(sources: Sequence[str]) -> Iterator[Path]:
    """The files that value_pretraining.from names. Raises BadInput for a directory without any."""
    for source in map(Path, sources):
        if not source.is_dir():
            yield source
            continue
        # The folder of a run's own evaluations or samples: it is read as the run
        parts = ("evaluation", "samples")
        within = source.name if source.name in parts else ""
        if within and (source.parent / "config.yaml").is_file():
            source = source.parent
        else:
            within = ""
        is_run = (source / "config.yaml").is_file()
        is_training = is_run and (source / "metrics.jsonl").is_file()
        places: tuple[str, ...] = _PLACES[0 if is_training else 1 if is_run else 2]
        # Evaluations keep neither tokens nor rewards of its episodes
        if is_run and _has_agent(source):
            places = tuple(place for place in places if place.startswith("samples"))
        places = tuple(place for place in places if place.startswith(within))
        paths = [
            path
            for place in places
            for path in sorted(source.glob(place))
            if "_problems." not in path.name
        ]
        if not paths:
            expected = (
                ", ".join(places)
                or "the samples of an agent's run, and evaluations keep no tokens of episodes"
            )
            raise BadInput(f"{KEY}: {source} holds none of {expected}: name files with responses")
        yield from paths


def _has_agent(run_dir: Path) -> bool:
    """Whether the config of a run names an agent."""
    try:
        return bool(
            yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["rollout"][
                "agent"
            ]
        )
    except (OSError, ValueError, yaml.YAMLError, TypeError, LookupError):
        return False


class Records:
    """The recorded responses that a config names. words: size of the model's vocabulary."""

    def __init__(self, config: TrainConfig, tokenizer: TextTokenizer, words: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._words = words
        self._origin = f"model.path={config.model.path}"

    def batches(self) -> Iterator[ExperienceBatch]:
        """The responses of each file, those to one prompt as a group.

        Raises:
            BadInput: a file cannot be read, or a record of it cannot be used.
        """
        for path in record_files(self._config.value_pretraining.records):
            groups: dict[tuple[int, ...], list[Sample]] = {}
            field = self._config.critic.privileged_field
            for number, given in _rows_of(path, field or "reward"):
                try:
                    row = translated(given)
                    ids = self._prompt_ids(row)
                    group = groups.setdefault(ids, [])
                    place = group[0].group if group else len(groups) - 1
                    text = privileged_text(row, field, f"{path}:{number}")
                    privileged = self._tokenizer.encode_privileged(text) if text else ()
                    prompt = Prompt(str(place), "", "", ids, privileged_ids=privileged)
                    group.append(self._sample(row, prompt, place, len(group)))
                except ValueError as error:
                    raise BadInput(f"{path}:{number}: {error}") from None
            if not groups:
                raise BadInput(
                    f"{path}, which {KEY} names, holds no row: give rows of prompt, response and "
                    "result"
                )
            yield from_samples([sample for group in groups.values() for sample in group])

    def _sample(self, row: Mapping[str, Any], prompt: Prompt, group: int, index: int) -> Sample:
        end = row.get("finish_reason")
        mask = row.get("loss_mask")
        if row.get("episode") and (
            row.get("response_ids") is None or self._config.rollout.agent is None
        ):
            raise ValueError(
                "an agent's episode without its tokens, or in a run without rollout.agent; leave "
                "it out"
            )
        if end not in (None, "stop", "length"):
            raise ValueError(
                f"finish_reason {end!r}, which is not all that was said; leave the row out"
            )
        ids = self._response_ids(row, end)
        logprobs = np.zeros(len(ids), np.float32)
        sample = Sample(
            prompt, group, index, 0, np.array(ids, np.int32), logprobs, end or "stop", 0, 0
        )
        sample.reward, sample.correct = self._result(row)
        if mask is not None:
            if (
                not isinstance(mask, list)
                or len(mask) != len(ids)
                or 1 not in mask
                or any(value not in (0, 1) for value in mask)
            ):
                raise ValueError(
                    f"loss_mask is no list of 0 and 1 for the {len(ids)} tokens of its response"
                )
            sample.loss_mask = None if all(mask) else np.array(mask, np.bool_)
        if row.get("episode"):
            self._add_episode(
                sample, row.get("segment_starts") or [], row.get("turn_rewards") or []
            )
        return sample

    def _add_episode(self, sample: Sample, starts: Any, rewards: Any) -> None:
        """starts, rewards: segment_starts and turn_rewards of a row, as a run's samples have
        them."""
        most = self._config.rollout.episode.max_tokens
        count = len(sample.prompt.token_ids) + len(sample.response_ids)
        if count > most:
            raise ValueError(
                f"its episode has {count} tokens, above rollout.episode.max_tokens={most}: raise it"
            )
        written = dict(enumerate(sample.written.tolist()))
        placed = np.zeros(len(sample.response_ids), np.float32)
        try:
            fit = not any(written[place] for place in starts)
            # At any token: a mask of the run's own may have covered it
            for (
                place,
                reward,
            ) in rewards:
                fit, placed[place] = fit and place >= 0 and abs(reward) <= LARGEST_REWARD, reward
        except (TypeError, ValueError, LookupError):
            fit = False
        if not fit:
            raise ValueError(
                "its segment_starts are no observations, or its turn_rewards no numbers at tokens"
            )
        sample.segment_starts = tuple(sorted(set(starts)))
        sample.turn_rewards = placed if rewards else None

    def _prompt_ids(self, row: Mapping[str, Any]) -> tuple[int, ...]:
        most = self._config.data.max_prompt_tokens
        if row.get("prompt_ids") is not None:
            ids = self._checked(row, "prompt_ids")
        elif row.get("input") is not None:
            ids = self._decoded(_text(row, "input"), "input", "verl")
        elif row.get(PROMPT_TEXT) is not None:
            ids = self._as_read(row[PROMPT_TEXT])
        elif row.get(PROMPT_MESSAGES) is not None:
            text = self._tokenizer.messages_text(row[PROMPT_MESSAGES])
            ids = tuple(self._tokenizer.encode_response(text))
        else:
            ids = tuple(self._tokenizer.encode_prompt(_text(row, "problem", "prompt")))
        if len(ids) > most and not row.get("episode"):
            raise ValueError(
                f"its prompt has {len(ids)} tokens, above data.max_prompt_tokens={most}: raise it"
            )
        return ids

    def _as_read(self, text: str) -> tuple[int, ...]:
        """The tokens of a prompt that TRL recorded: with its special tokens, or without them."""
        ids = tuple(self._tokenizer.encode_response(text))
        if self._tokenizer.decode(ids) != self._tokenizer.decode_all(ids):
            return ids
        return self._decoded(text, "prompt", "TRL")

    def _decoded(self, text: str, name: str, program: str) -> tuple[int, ...]:
        """The prompt of data.train that reads like this without special tokens."""
        if (ids := self._decoded_prompts.get(text, ())) == ():
            raise ValueError(
                f"its {name} is no prompt of data.train; {program} writes prompts without their "
                "special tokens, so they are looked up there: give data.train and data.prompt "
                "as that run had them"
            )
        return ids

    @cached_property
    def _decoded_prompts(self) -> dict[str, tuple[int, ...]]:
        prompts = train_prompts(self._config.data, self._tokenizer)
        return {self._tokenizer.decode(prompt.token_ids): prompt.token_ids for prompt in prompts}

    def _response_ids(self, row: Mapping[str, Any], end: str | None) -> Sequence[int]:
        most = self._config.sampling.max_new_tokens
        tokenizer = self._tokenizer
        has_ids = row.get("response_ids") is not None
        text = row.get("response") if has_ids else _text(row, "response", "output")
        ids = (
            self._checked(row, "response_ids")
            if has_ids
            else tuple(tokenizer.encode_response(str(text)))
        )
        if text and text not in (tokenizer.decode(ids), tokenizer.decode_all(ids)):
            raise ValueError(
                f"the tokens of its response are another text in {self._origin}: another "
                "tokenizer's"
            )
        if not has_ids:
            if end is None and len(ids) >= most:
                raise ValueError(
                    f"its response has {len(ids)} tokens, and sampling.max_new_tokens={most}: it "
                    "may be truncated text; give finish_reason, stop or length, or raise that key"
                )
            ids = ids if end == "length" else (*ids, tokenizer.eos_id)
            if row.get("tokens", len(ids)) != len(ids):
                raise ValueError(
                    f"its response is {len(ids)} tokens in {self._origin} and was {row['tokens']}: "
                    "truncated text, or another tokenizer's; records with response_ids need no "
                    "tokenizer"
                )
        if len(ids) > most and not row.get("episode"):
            raise ValueError(
                f"its response has {len(ids)} tokens, above sampling.max_new_tokens={most}: raise "
                "it"
            )
        return ids

    def _checked(self, row: Mapping[str, Any], name: str) -> tuple[int, ...]:
        ids = row[name]
        if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
            raise ValueError(f"{name} is no list of token ids; give one with an entry at least")
        if strange := [number for number in ids if not 0 <= number < self._words]:
            raise ValueError(
                f"{name} has {strange[0]}, and {self._origin} {self._words} words: another "
                "tokenizer's"
            )
        return tuple(ids)

    def _result(self, row: Mapping[str, Any]) -> tuple[float, bool]:
        """Reward and grade: a verdict is worth what this run's is; a number has to be a reward of
        this run."""
        config = self._config.reward
        is_episode = bool(row.get("episode"))
        grades = VERIFIERS[config.verifier].grades
        is_verdict = grades == "verdict"
        is_score = grades == "score"
        for name in ("correct", "acc", "result") if is_verdict and not is_episode else ():
            if isinstance(row.get(name), bool) or (name == "acc" and row.get(name) in (0, 1)):
                return (config.correct if row[name] else config.incorrect), bool(row[name])
        numbers = {
            name: row[name] for name in ("reward", "score", "result") if row.get(name) is not None
        }
        name, number = next(iter(numbers.items()), ("result", None))
        if not isinstance(number, int | float) or not abs(number) <= LARGEST_REWARD:
            raise ValueError(
                f"its {name} is {'missing' if number is None else repr(number)}: leave the row out"
            )
        if is_episode:  # its agent may have graded it
            return float(number), row.get("correct") is True
        if is_verdict and number not in (config.correct, config.incorrect):
            raise ValueError(
                f"its {name} {number:g} is neither reward.correct={config.correct:g} nor "
                f"reward.incorrect={config.incorrect:g}: set these as they were, or give correct, "
                "true or false"
            )
        above = config.correct_above
        return float(
            number
        ), above is not None and number > above if is_score else number == config.correct


def _rows_of(path: Path, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    refuse_binary(path, KEY)
    if path.suffix == ".pt":
        return slime_rows(path, field, KEY)
    if path.suffix == ".parquet":
        return parquet_rows(path, KEY)
    return read_rows(path, KEY)


def _text(row: Mapping[str, Any], *names: str) -> str:
    for name in names:
        if isinstance(row.get(name), str) and row[name]:
            return str(row[name])
    raise ValueError(f"no text in {' or '.join(names)}: every record needs one")
