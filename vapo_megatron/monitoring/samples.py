"""Responses of a run, kept for people to read, some with the value and advantage of every token."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.data.sample import Sample
from vapo_megatron.errors import BadInput

_logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]

# Tokens with estimates: of a longer response the first and the last half of this number.
LONGEST = 4096
_DECIMALS = 4
_OTHERS = "_others.jsonl"  # end of the name of a file for value_pretraining.from


class SampleWriter:
    """Keeps the first groups of every step in run_dir/samples/step_000012.jsonl, one sample per
    line."""

    def __init__(
        self,
        run_dir: Path,
        groups_per_step: int,
        with_tokens: int = 0,
        decode: Decode | None = None,
    ) -> None:
        """groups_per_step 0 keeps nothing. with_tokens: the number of samples with estimates;
        decode: ids to text."""
        self._folder = run_dir / "samples"
        self._groups = groups_per_step
        self._with_tokens = with_tokens
        self._decode = decode
        self._kept: list[tuple[int, Sample]] = []
        self._rows: list[dict[str, Any]] = []
        self._refused: Path | None = None  # the last file that was
        self.failures = 0

    def write(
        self, step: int, samples: Sequence[Sample], dropped: Sequence[Sample] = ()
    ) -> Path | None:
        """Write the samples of the step's first groups, in the order of group and index; the file,
        or None if none.

        dropped: drawn for the step and not trained on. At step 1, whose samples the initial policy
            wrote, they go into another file with the rest of `samples`: together the files hold
            every kind of group as often as it was drawn. If a file cannot be written, the run
            continues without it, with a warning, and
        `failures` counts it once.
        """
        groups = set(sorted({sample.group for sample in samples})[: self._groups])
        chosen = [(place, sample) for place, sample in enumerate(samples) if sample.group in groups]
        self._kept = sorted(chosen, key=lambda entry: (entry[1].group, entry[1].index))
        self._rows = [_row(sample, step <= 1, self._decode) for _, sample in self._kept]
        if step == 1:
            with suppress(OSError):  # of an attempt that ended before its first checkpoint
                (self._folder / f"step_000001{_OTHERS}").unlink()
            if dropped:
                others = (sample for sample in samples if sample.group not in groups)
                self._save(1, _OTHERS, (_row(sample, True) for sample in (*others, *dropped)))
        if self._rows:
            return self._save(step)
        return None

    def with_tokens_among(self, group_ids: Tensor) -> int:
        """The number of a step's first samples that add_estimates needs. group_ids: int64 [S]."""
        kept = group_ids.unique()[: self._groups if self._with_tokens else 0]
        if len(kept):
            return int(torch.isin(group_ids, kept).nonzero().max()) + 1
        return 0

    def add_estimates(
        self, step: int, values: Tensor | None, advantages: Tensor | None, cu_seqlens: Tensor
    ) -> None:
        """Add `estimates` to some rows of the step, half of them of correct responses.

        They hold the texts of tokens (a character cut over several tokens belongs to the last of
        them), their values and advantages (null for tokens that the policy was given), the rewards
        of turns, and `left_out`, the number of tokens left out in the middle.

        Args:
            values, advantages: float32 [T], of the first samples given to write
                (with_tokens_among); None: there are none.
            cu_seqlens: int64 [S + 1].
        """
        if self._decode is None:
            return
        # The first responses to many problems rather than many to one.
        order = sorted(range(len(self._kept)), key=lambda number: self._kept[number][1].index)
        chosen = _of_both_kinds([self._kept[number][1] for number in order], self._with_tokens)
        for number in (order[place] for place in chosen):
            place, sample = self._kept[number]
            start = int(cu_seqlens[place])
            count = len(sample.response_ids)
            head = count if count <= LONGEST else LONGEST // 2
            if head == count:
                parts = [slice(0, head)]
            else:
                parts = [slice(0, head), slice(count - (LONGEST - head), count)]
            ids = [sample.response_ids[part].tolist() for part in parts]
            texts = [text for part in ids for text in token_texts(part, self._decode)]
            estimates: dict[str, Any] = {"left_out": max(0, count - LONGEST), "tokens": texts}
            for name, tensor in (("values", values), ("advantages", advantages)):
                if tensor is not None:
                    estimates[name] = [
                        number for part in parts for number in _spread(tensor[start:], sample)[part]
                    ]
            if sample.turn_rewards is not None:
                estimates["rewards"] = [
                    reward or None
                    for part in parts
                    for reward in sample.turn_rewards[part].tolist()
                ]
            self._rows[number]["estimates"] = estimates
        if any("estimates" in row for row in self._rows):
            self._save(step)

    def take(self) -> list[dict[str, Any]]:
        """The rows written since the last take, in the file's order."""
        rows = self._rows
        self._rows = []
        self._kept = []
        return rows

    def _save(
        self, step: int, end: str = ".jsonl", rows: Iterable[dict[str, Any]] | None = None
    ) -> Path | None:
        path = self._folder / f"step_{step:06d}{end}"
        try:
            write_rows(path, self._rows if rows is None else rows)
        except BadInput as error:
            if path != self._refused:  # it is tried again with its estimates
                self._refused = path
                self.failures = self.failures + 1
                _logger.warning("samples of step %d are not kept: %s", step, error)
            return None
        return path


def token_texts(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds to those before it. A token that ends within a character adds
    nothing."""
    texts: list[str] = []
    context: list[int] = []
    pending: list[int] = []
    for token in token_ids:
        pending.append(token)
        # Tokenizers drop a blank at the start of a text: what a token adds shows behind another
        # one.
        text = decode([*context, *pending])[len(decode(context)) if context else 0 :]
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 8:
            texts.append("")
        else:
            texts.append(text)
            context = pending[-1:]
            pending = []
    return texts


def _spread(numbers: Tensor, sample: Sample) -> list[float | None]:
    """The numbers of a sample's written tokens, by token of its response; `numbers` begins with
    them."""
    rounded = iter(
        [round(number, _DECIMALS) for number in numbers[: int(sample.written.sum())].tolist()]
    )
    return [next(rounded) if written else None for written in sample.written.tolist()]


def _of_both_kinds(samples: Sequence[Sample], wanted: int) -> list[int]:
    """Indices of `wanted` samples, half of them correct while there are both kinds."""
    correct = [number for number, sample in enumerate(samples) if sample.correct]
    others = [number for number, sample in enumerate(samples) if not sample.correct]
    share = max(wanted - wanted // 2, wanted - len(others))
    good = correct[:share]
    return sorted(good + others[: wanted - len(good)])


def _turns(sample: Sample, decode: Decode) -> list[dict[str, Any]]:
    """The policy's text and the observations it was given, turn by turn."""
    bounds = [0, *(np.flatnonzero(np.diff(sample.written)) + 1).tolist(), len(sample.response_ids)]
    return [
        {
            "observed": not bool(sample.written[start]),
            "text": decode(sample.response_ids[start:end].tolist()),
        }
        for start, end in pairwise(bounds)
        if end > start
    ]


def _row(sample: Sample, with_ids: bool, decode: Decode | None = None) -> dict[str, Any]:
    """with_ids: the policy has not been updated yet, so its tokens can serve
    value_pretraining.from."""
    ids = {
        "prompt_ids": list(sample.prompt.token_ids),
        "response_ids": sample.response_ids.tolist(),
    }
    masks: dict[str, Any] = {}
    if sample.loss_mask is not None:
        masks["loss_mask"] = sample.loss_mask.astype(int).tolist()
    if sample.segment_starts:
        masks["segment_starts"] = list(sample.segment_starts)
    if sample.turn_rewards is not None and len(sample.turn_rewards):
        rewards = enumerate(sample.turn_rewards.tolist())
        masks["turn_rewards"] = [[n, reward] for n, reward in rewards if reward]
    return {
        "prompt_id": sample.prompt.id,
        "group": sample.group,
        "index": sample.index,
        "problem": sample.prompt.problem,
        "answer": sample.prompt.answer,
        "response": sample.text,
        "tokens": int(sample.written.sum()),
        "finish_reason": sample.finish_reason,
        "reward": sample.reward,
        "correct": sample.correct,
        "grade_reason": sample.grade_reason,
        "weight_version": sample.weight_version,
        **({"copied": True} if sample.copied else {}),
        **({} if sample.episode is None else {"episode": sample.episode}),
        **({} if sample.loss_mask is None or decode is None else {"turns": _turns(sample, decode)}),
        **(ids | masks if with_ids else {}),
    }
