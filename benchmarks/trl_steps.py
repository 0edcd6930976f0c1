"""TRL's side of benchmarks.step_beside_trl: python trl_steps.py FOLDER OUT SIZES, by the Python of
.venv-trl.

FOLDER holds model/ and train.jsonl. OUT becomes a list of a step's response tokens and seconds.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Seconds of the parts of a step, read off the methods that do them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.now: dict[str, float] = {}
        self.start = 0.0

    def time(self, owner: Any, method: str, name: str) -> None:
        """Add the seconds of a method to a part."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            answer = original(*args, **kwargs)
            self.now[name] = self.now.get(name, 0.0) + time.perf_counter() - start
            return answer

        setattr(owner, method, timed)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.now, self.start = {}, time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        whole = time.perf_counter() - self.start
        generation, scoring = self.now["generation"], self.now["collection"]
        # training_step holds the collection; the optimizer's step comes after it.
        update = self.now["training_step"] - scoring + self.now["optimizer"]
        self.steps.append(
            {
                "tokens": self.now["tokens"],
                "generation": generation,
                "update": update,
                "step": whole,
            }
        )


def main(folder: Path, out: Path, sizes: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    clock = Clock()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        clock.now["tokens"] = float(sum(map(len, completion_ids)))
        return [float(len(ids) % 2) for ids in completion_ids]

    samples = sizes["prompts"] * sizes["group"]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=samples,
        num_generations=sizes["group"],
        max_completion_length=sizes["longest"],
        max_steps=sizes["steps"],
        learning_rate=3e-6,
        beta=0.0,
        temperature=1.0,
        bf16=sizes["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        use_cpu=not sizes["cuda"],
        # Continuous batching is made for GPUs.
        use_transformers_continuous_batching=sizes["cuda"],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["problem"]} for row in rows]),
        callbacks=[clock],
    )
    clock.time(trainer, "_generate_single_turn", "generation")
    clock.time(trainer, "_generate_and_score_completions", "collection")
    clock.time(trainer, "training_step", "training_step")
    trainer.create_optimizer()
    clock.time(trainer.optimizer, "step", "optimizer")
    trainer.train()
    out.write_text(json.dumps(clock.steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
