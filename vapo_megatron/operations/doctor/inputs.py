"""Whether what the run reads is there and whole on a node: the model, its tokenizer, the problems."""

import hashlib
from pathlib import Path

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.prompts import eval_prompts, train_prompts
from vapo_megatron.data.rows import eval_problems, train_problems
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.operations.doctor.report import Line
from vapo_megatron.weights.load import check_weights
from vapo_megatron.weights.spec import read_spec


def check_model(config: TrainConfig) -> list[Line]:
    """config.json, the headers of all weights, and the tokenizer; raises BadInput for what is wrong with them."""
    directory = Path(config.model.path)
    spec = read_spec(directory)
    check_weights(directory, spec, "lm")
    TextTokenizer(directory, config.data.prompt).check_vocabulary(spec.vocab_size)
    lines = [Line("ok", f"{directory}: {spec.family}, {spec.parameter_count():,} parameters, tokenizer fits")]
    if config.algorithm.uses_critic and config.critic_source != directory:
        source, is_new = config.critic_source, config.critic.init == "policy"
        critic = read_spec(source, value_outputs=config.algorithm.value_loss.outputs)
        check_weights(source, critic, "value", value_head="new" if is_new else "saved")
        TextTokenizer(directory, config.data.prompt).check_same(source, config.critic_key)
        head = "for the critic" if is_new else "with its value head"
        lines.append(Line("ok", f"{source}: {critic.family}, {critic.parameter_count():,} parameters, {head}"))
    return lines


def check_data(config: TrainConfig) -> list[Line]:
    """Every problem of every file; raises BadInput for the first that cannot be used."""
    data = config.data
    for entry in data.eval:  # before what needs a model, which may be missing too
        eval_problems(entry, data.fields)
    train_problems(data)
    tokenizer = TextTokenizer(Path(config.model.path), data.prompt)
    counts = [f"{data.train}: {len(train_prompts(data, tokenizer))} prompts"]
    counts += [f"{entry.path}: {len(eval_prompts(entry, data, tokenizer))}" for entry in data.eval]
    return [Line("ok", ", ".join(counts))]


def fingerprint(config: TrainConfig) -> str:
    """A digest of what the model's and the data's files are here: names, sizes, and config.json as a whole."""
    digest = hashlib.sha256()
    directory = Path(config.model.path)
    files = [*sorted(path for path in directory.glob("*") if path.is_file()), config.data.train]
    for path in (*files, *(entry.path for entry in config.data.eval)):
        digest.update(f"{path.name} {path.stat().st_size if path.exists() else 'absent'}\n".encode())
    if (directory / "config.json").is_file():
        digest.update((directory / "config.json").read_bytes())
    return digest.hexdigest()[:16]
