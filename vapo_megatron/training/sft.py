"""Supervised fine-tuning: the cold start of a policy, on the same Megatron code as everything after
it."""

import hashlib
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from vapo_megatron.checkpoint.checkpointer import Checkpointer
from vapo_megatron.checkpoint.checkpoints import final_dir, mark_final
from vapo_megatron.checkpoint.manifest import Progress
from vapo_megatron.checkpoint.resume import SavedModel, Start, open_resumed, restore_run_files
from vapo_megatron.checkpoint.state_saver import SavedRun, Snapshot, run_id_of
from vapo_megatron.collectives import on_rank_zero
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.model_card import write_card
from vapo_megatron.files import refusals_interrupt
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.losses import NegativeLogLikelihood
from vapo_megatron.training.outputs import gpus_held
from vapo_megatron.training.skipped_updates import SkippedUpdates
from vapo_megatron.weights.export import adapter_folder, save_adapters, save_hf
from vapo_megatron.weights.load import load_hf


def read_demonstrations(
    path: Path,
    encode_prompt: Callable[[str], list[int]],
    encode_response: Callable[[str], list[int]],
    eos_token_id: int,
    max_tokens: int,
) -> list[Sample]:
    """Rows {problem, response} as samples whose responses end with EOS.

    Raises:
        BadInput: no such file, a row that is not JSON or lacks a field, a row that is too long, no
            row at all.
    """
    samples: list[Sample] = []
    for number, row in read_rows(path, "data.path"):
        for name in ("problem", "response"):
            if not isinstance(row.get(name), str) or not row[name]:
                raise BadInput(
                    f"{path}:{number}: field {name!r} is missing or empty: every row needs text "
                    "there"
                )
        prompt_ids = tuple(encode_prompt(row["problem"]))
        response_ids = np.array([*encode_response(row["response"]), eos_token_id])
        if len(prompt_ids) + len(response_ids) > max_tokens:
            raise BadInput(
                f"{path}:{number}: {len(prompt_ids) + len(response_ids)} tokens are above "
                f"data.max_tokens={max_tokens}: raise it or drop the row"
            )
        prompt = Prompt(
            str(row.get("id", number)), row["problem"], "", prompt_ids, cursor=len(samples)
        )
        no_logprobs = np.zeros(len(response_ids), dtype=np.float32)
        samples.append(
            Sample(prompt, len(samples), 0, 0, response_ids, no_logprobs, "stop", 0, 0, reward=0.0)
        )
    if not samples:
        raise BadInput(
            f"{path}: holds no row: give demonstrations with the fields problem and response"
        )
    return samples


def load_demonstrations(config: SftConfig) -> ExperienceBatch:
    """All rows of the file, tokenised and packed.

    Raises:
        BadInput: the file or a row of it cannot be used.
    """
    tokenizer = TextTokenizer(Path(config.model.path), config.data.prompt)
    return from_samples(
        read_demonstrations(
            Path(config.data.path),
            tokenizer.encode_prompt,
            tokenizer.encode_response,
            tokenizer.eos_id,
            config.data.max_tokens,
        )
    )


def planned_steps(config: SftConfig, demonstrations: int) -> int:
    """Optimizer steps of a whole fine-tuning."""
    return config.data.steps or math.ceil(
        demonstrations * config.data.epochs / config.data.batch_size
    )


def batch_order(rows: int, batch_size: int, steps: int, seed: int) -> list[list[int]]:
    """Rows of each optimizer step: every epoch a new permutation, cut into batches that may span
    two epochs."""
    generator = random.Random(seed)
    stream: list[int] = []
    while len(stream) < steps * batch_size:
        epoch = list(range(rows))
        generator.shuffle(epoch)
        stream += epoch
    return [stream[i * batch_size : (i + 1) * batch_size] for i in range(steps)]


def fingerprint(demonstrations: ExperienceBatch) -> str:
    """A digest of all tokens, and of where each demonstration and its response begin."""
    digest = hashlib.sha256()
    for tensor in (demonstrations.tokens, demonstrations.cu_seqlens, demonstrations.prompt_lengths):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()[:16]


def check_same_data(config: SftConfig, now: str, saved: str | None) -> None:
    """Raises BadInput if a run would resume with other demonstrations; saved None: the checkpoint
    does not say."""
    if saved not in (None, now):
        raise BadInput(
            f"data.path={config.data.path}: its fingerprint is {now} and was {saved} when the run "
            "was saved: resume with the data, template and tokenizer that the run was started "
            "with, or choose another run.name"
        )


def sft_rank(config: SftConfig, run_dir: Path, start: Start) -> None:
    """Collective: the whole fine-tuning of one rank; ends with a Hugging Face directory."""
    batch = load_demonstrations(config)
    is_main_rank = dist.get_rank() == 0
    data = fingerprint(batch)
    if start.checkpoint is not None:
        resumed = open_resumed(start.checkpoint, start.copy)
    else:
        resumed = None
    if resumed is not None:
        on_rank_zero(partial(check_same_data, config, data, resumed.progress.demonstrations))
    spec = read_spec(Path(config.model.path))
    mesh = make_mesh(config.actor.layout, "actor")
    actor = Trainable(
        spec, config.model, config.actor, mesh, "lm", name="actor", seed=config.run.seed
    )
    if resumed is None or actor.adapter is not None:  # of which a checkpoint has adapters alone
        load_hf(actor.chunks, spec, Path(config.model.path), mesh, "lm")
    actor.prepare()
    updates = SkippedUpdates(resumed.progress.updates if resumed is not None else None)
    actor.accepts = updates.accepts
    saved = {"actor": SavedModel(actor, Path(config.model.path))}
    first = 1
    if resumed is not None:
        resumed.load(actor, "actor")
        resumed.restore_generators(saved)
        if is_main_rank:
            restore_run_files(run_dir, resumed, config)
        first = resumed.progress.step + 1
    steps = planned_steps(config, batch.samples)
    order = batch_order(batch.samples, config.data.batch_size, steps, config.run.seed)
    start_step = 0 if resumed is None else first
    gpus = gpus_held()
    with (
        Recorder(run_dir, config.monitoring, is_main_rank, start_step, gpus=gpus) as recorder,
        refusals_interrupt(),
    ):
        whole = SavedRun(config, "sft", run_dir, saved, run_id_of(resumed))
        checkpointer = Checkpointer(config.checkpoint, whole, recorder, resumed, start.memory)
        _show_header(config, spec, batch, steps, run_dir, recorder)
        if resumed is not None:
            recorder.console.note(f"resumes from {resumed.checkpoint}")
        losses: list[float] = []
        with recorder.console.phase("fine-tuning", total=steps) as advance:
            advance(first - 1)
            for step, samples in enumerate(order[first - 1 :], first):
                losses += _update(actor, batch.select(samples), updates, recorder)
                recorder.add_cost()
                metrics = recorder.write(step)
                if updates.exhausted:
                    checkpointer.wait()
                    updates.end(run_dir, step)
                advance(1)
                last = step == steps
                every = config.checkpoint.every is not None and step % config.checkpoint.every == 0
                checkpointer.safe_point(
                    Snapshot(
                        Progress(step=step, demonstrations=data, updates=updates.state()), metrics
                    ),
                    due=every or (last and config.checkpoint.saves),
                    last=last,
                )
        final = _save_final(config, run_dir, actor, max(steps, first - 1))
        recorder.console.closing(
            f"{config.run.name} finished",
            {
                "loss": " -> ".join(f"{loss:.3f}" for loss in (*losses[:1], *losses[-1:])),
                "model": final,
            },
        )


def _show_header(
    config: SftConfig,
    spec: ModelSpec,
    batch: ExperienceBatch,
    steps: int,
    run_dir: Path,
    recorder: Recorder,
) -> None:
    size = f"{spec.parameter_count():,} parameters"
    recorder.console.header(
        f"vapo-megatron sft: {config.run.name}",
        {
            "model": f"{config.model.path} ({spec.family}, {size})",
            "layout": config.actor.layout.describe(dist.get_world_size()),
            "data": (
                f"{config.data.path}: {batch.samples} demonstrations, "
                f"{int(batch.lengths.sum()):,} tokens"
            ),
            "steps": f"{steps} of {config.data.batch_size} demonstrations",
            "run": run_dir,
        },
    )


def _update(
    actor: Trainable, part: ExperienceBatch, updates: SkippedUpdates, recorder: Recorder
) -> list[float]:
    """Make an optimizer step of these demonstrations and record it; returns its loss, or nothing
    where it was skipped."""
    with recorder.timer("step"):
        weights = torch.full((part.response_tokens,), 1 / part.response_tokens)
        result = actor.train_step(part, range(part.samples), NegativeLogLikelihood(weights))
    recorder.add(
        {"sft/tokens": float(part.lengths.sum()), "actor/lr": result.lr} | updates.metrics()
    )
    if not result.updated:
        return []
    loss = result.metrics["nll_loss"]
    recorder.add(
        {
            "sft/nll_loss": loss,
            "sft/entropy": result.metrics["entropy"],
            "actor/grad_norm": result.grad_norm,
        }
    )
    return [loss]


def _save_final(config: SftConfig, run_dir: Path, actor: Trainable, step: int) -> Path:
    """Write the final Hugging Face directory, marked complete only once it is whole."""
    base = Path(config.model.path)
    final = final_dir(run_dir) / "actor"
    on_rank_zero(partial(mark_final, run_dir, None))
    save_hf(actor.chunks, actor.spec, actor.mesh, "lm", base, final)
    if actor.adapter is not None:
        save_adapters(
            actor.chunks, actor.spec, actor.mesh, actor.adapter, base, adapter_folder(final)
        )
    on_rank_zero(partial(mark_final, run_dir, step))
    on_rank_zero(partial(write_card, run_dir, final, config))
    return final
