"""TRL's side of examples.smollm.beside_trl: python trl_side.py SETTINGS.json, by the Python of
.venv-trl.

The settings name model, problems, sizes, seed and the folder that becomes the trained model.
`steps` in the file `out` is a list of each step's accuracy, response tokens and seconds.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trl_steps import Clock
from examples.smollm.grading import SUFFIX, is_right


class Progress(TrainerCallback):
    """A line for each step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        step = self.clock.steps[-1]
        line = f"TRL step {len(self.clock.steps)}: {step['accuracy']:.3f}, {step['step']:.0f} s"
        print(line, flush=True)


class AccuracyClock(Clock):
    """Keeps the accuracy of a step's responses beside its seconds."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        self.steps[-1]["accuracy"] = self.now["accuracy"]


Reward = Callable[..., list[float]]


def trainer_of(
    settings: Mapping[str, Any], reward: Reward, callbacks: Sequence[TrainerCallback]
) -> GRPOTrainer:
    """TRL's trainer with the settings of our side (beside_trl.OURS)."""
    lines = Path(settings["problems"]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    prompts = [
        {
            "prompt": [{"role": "user", "content": row["problem"] + SUFFIX}],
            "answer": row["answer"],
        }
        for row in rows
    ]
    samples = settings["prompts"] * settings["group"]
    microbatches = 4
    config = GRPOConfig(
        output_dir=settings["export"],
        seed=settings["seed"],
        # TRL counts responses: micro-batches of a step, as ours has them.
        per_device_train_batch_size=samples // microbatches,
        gradient_accumulation_steps=microbatches,
        num_generations=settings["group"],
        max_completion_length=settings["longest"],
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        # Token losses are divided by the tokens of all responses of a step.
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    return GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        callbacks=list(callbacks),
    )


def main(settings: Mapping[str, Any]) -> None:
    """Train, write the model and the figures."""
    clock = AccuracyClock()

    def reward(
        completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        clock.now["tokens"] = float(sum(map(len, completion_ids)))
        texts = [completion[0]["content"] for completion in completions]
        rewards = [float(is_right(text, a)) for text, a in zip(texts, answer, strict=True)]
        clock.now["accuracy"] = sum(rewards) / len(rewards)
        return rewards

    trainer = trainer_of(settings, reward, [clock, Progress(clock)])
    clock.time(trainer, "_generate_single_turn", "generation")
    clock.time(trainer, "_generate_and_score_completions", "collection")
    clock.time(trainer, "training_step", "training_step")
    trainer.create_optimizer()
    clock.time(trainer.optimizer, "step", "optimizer")
    trainer.train()
    trainer.save_model(settings["export"])
    Path(settings["out"]).write_text(json.dumps(clock.steps), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
