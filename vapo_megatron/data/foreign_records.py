"""Rollouts that other programs recorded, as rows of data/records.py: traces of verifiers and
prime-rl, TRL's completions, slime's dumps.

What a file does not say is not guessed: a row whose tokens or reward cannot be had is refused by
what it lacks.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from vapo_megatron.errors import BadInput, reason_of

_logger = logging.getLogger(__name__)

# A prompt as the model read it, special tokens and all; and messages that its template makes one.
PROMPT_TEXT = "prompt_text"
PROMPT_MESSAGES = "prompt_messages"

_SLIME_ENDS = {"completed": "stop", "truncated": "length"}
# Columns of TRL's completions that are no reward function's.
_TRL_COLUMNS = {"mode", "step", "prompt", "completion", "advantage", "image", "images"}


def translated(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of any of these programs as records have it; one of our own as it is.

    Raises:
        ValueError: its tokens or its reward cannot be had.
    """
    if isinstance(row.get("trajectory"), list):
        return _graded(row, _from_trajectory(row["trajectory"]))
    if isinstance(row.get("completion"), list):
        return _graded(row, _from_messages(row))
    if isinstance(row.get("completion"), str) and "advantage" in row:
        return _from_trl(row)
    if isinstance(row.get("reward"), Mapping):
        return {**row, "reward": None, **_one_reward(row["reward"])}
    return row


def _graded(row: Mapping[str, Any], tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a trace that records read."""
    if row.get("error"):
        raise ValueError(
            f"an episode that broke ({str(row['error'])[:80]}), whose reward says nothing; leave "
            "it out"
        )
    kept = {name: row[name] for name in ("reward", "answer", "info") if name in row}
    return {**kept, "finish_reason": _end(row.get("is_truncated")), **tokens}


def _end(is_truncated: Any) -> str | None:
    """The finish_reason of a trace that says whether it was truncated; None where it does not."""
    if not isinstance(is_truncated, bool):
        return None
    return "length" if is_truncated else "stop"


def _from_trajectory(steps: Sequence[Any]) -> dict[str, Any]:
    """The tokens of a trace: the prompt of its first request, and what follows, masked where the
    policy did not write."""
    if not steps:
        raise ValueError("its trajectory is empty; leave it out")
    prompt: list[int] = []
    response: list[int] = []
    mask: list[int] = []
    for number, step in enumerate(steps):
        read, wrote, written = _tokens_of(step, number)
        if not number:
            prompt = read
        seen = [*prompt, *response]
        if read[: len(seen)] != seen:
            raise ValueError(
                f"step {number} of its trajectory rewrites the history before it, so it is no "
                "single sequence; give each step as a record, or leave it out"
            )
        given = read[len(seen) :]
        response += [*given, *wrote]
        mask += [0] * len(given) + written
    last = steps[-1]
    found: dict[str, Any] = {"prompt_ids": prompt, "response_ids": response, "loss_mask": mask}
    if (end := _end(last.get("is_truncated"))) is not None:
        found["finish_reason"] = end
    return found


def _tokens_of(step: Any, number: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens that a step of a trajectory read, those that it wrote, and their mask."""
    tokens = step.get("tokens") if isinstance(step, Mapping) else None
    if not isinstance(tokens, Mapping) or not tokens.get("completion_ids"):
        raise ValueError(
            f"step {number} of its trajectory has no tokens: let the engine return token ids when "
            "it is recorded"
        )
    wrote = tokens["completion_ids"]
    found = {"prompt_ids": tokens.get("prompt_ids"), "completion_ids": wrote}
    found["completion_mask"] = tokens.get("completion_mask") or [1] * len(wrote)
    for name, values in found.items():
        if not isinstance(values, list):
            raise ValueError(
                f"{name} of step {number} of its trajectory is {str(values)[:40]}, expected a "
                "list: record the step with both prompt_ids and completion_ids, or leave it out"
            )
    return found["prompt_ids"], wrote, found["completion_mask"]


def _from_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation of one answer, as `vf-eval --save-results` writes it without tokens."""
    remedy = "save its trajectory with tokens (vf-eval: the state column trajectory)"
    messages, answer = row.get("prompt"), row["completion"]
    if not isinstance(messages, list):
        raise ValueError(f"its prompt is no list of messages, so its tokens are unknown: {remedy}")
    if len(answer) != 1 or not isinstance(answer[0], Mapping):
        raise ValueError(
            f"its completion has {len(answer)} messages, whose tokens are unknown: {remedy}"
        )
    (message,) = answer
    strange = [name for name in ("tool_calls", "reasoning_content") if message.get(name)]
    if strange or not isinstance(message.get("content"), str):
        what = strange[0] if strange else "content that is no text"
        raise ValueError(f"its answer has {what}, whose tokens are unknown: {remedy}")
    return {PROMPT_MESSAGES: messages, "response": message["content"]}


def _from_trl(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the parquet files that TRL writes with log_completions."""
    rewards = {
        name: value
        for name, value in row.items()
        if name not in _TRL_COLUMNS and isinstance(value, int | float)
    }
    if len(rewards) != 1 and "reward" not in rewards:
        raise ValueError(
            f"its reward functions are {', '.join(rewards) or 'none'}, and how they were weighted "
            "is not in the file: add a column reward"
        )
    reward = rewards.get("reward", next(iter(rewards.values())))
    prompt = row.get("prompt")
    if not isinstance(prompt, str):
        raise ValueError(f"its prompt is {str(prompt)[:40]}, expected the text that TRL logs")
    return {PROMPT_TEXT: prompt, "response": row["completion"], "reward": reward}


def _one_reward(reward: Mapping[str, Any]) -> dict[str, Any]:
    """score and acc of a reward that is a dictionary, or the only number in it."""
    found = {name: reward[name] for name in ("score", "acc") if name in reward}
    if "score" in found:
        return found
    numbers = {name: value for name, value in reward.items() if isinstance(value, int | float)}
    if len(numbers) != 1:
        raise ValueError(
            f"its reward has {', '.join(map(str, reward)) or 'nothing'} and no score: which of "
            "them counts is not said, write it as one number"
        )
    return {"score": float(next(iter(numbers.values())))}


def slime_rows(path: Path, field: str, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a file that torch.save wrote, with one more field of them; no code in it is run.

    Samples that slime left out of training (remove_sample, or a loss mask of zeros) are passed
    over, with a warning. key: the config key that names the file.

    Raises:
        BadInput: it is no such file.
    """
    try:
        samples = torch.load(path, map_location="cpu", weights_only=True)["samples"]
        rows = [(row, row["tokens"], -row["response_length"], row["status"]) for row in samples]
    except (
        OSError,
        RuntimeError,
        UnpicklingError,
        KeyError,
        TypeError,
        ValueError,
        EOFError,
    ) as error:
        raise BadInput(
            f"{path}, which {key} names: no rollout dump of slime that can be read without running "
            f"code from it ({reason_of(error)[:100]}): write its samples as jsonl, with "
            "prompt_ids, response_ids and reward"
        ) from None
    left_out = 0
    for number, (row, tokens, begin, status) in enumerate(rows):
        mask = row.get("loss_mask")
        if not isinstance(tokens, list) or not isinstance(mask, list | None):
            raise BadInput(
                f"{path}:{number}: tokens or loss_mask is no list, as slime has them: write its "
                "samples as jsonl, with prompt_ids, response_ids and reward"
            )
        if row.get("remove_sample") or (mask is not None and not any(mask)):
            left_out += 1
            continue
        ids = {"prompt_ids": tokens[:begin], "response_ids": tokens[begin:]}
        more = {name: row.get(name) for name in ("response", "reward", "loss_mask", field)}
        yield number, ids | more | {"finish_reason": _SLIME_ENDS.get(status, status)}
    if left_out:
        _logger.warning("%s: %d samples that slime left out of training", path, left_out)


def parquet_rows(path: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a parquet file, from 1. Raises BadInput where it cannot be read."""
    import pyarrow
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches()
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from enumerate(rows, start=1)
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise BadInput(
            f"{path}, which {key} names: cannot be read as parquet ({reason_of(error)[:100]})"
        ) from None


def refuse_binary(path: Path, key: str) -> None:
    """Raises BadInput for files that hold rollouts in a form of one version of a program."""
    if path.suffix == ".bin":
        raise BadInput(
            f"{path}, which {key} names: prime-rl's rollouts.bin names no fields and changes with "
            "its version: give train_rollouts.jsonl beside it"
        )
