"""The model card (README.md) of what a run exports: base, algorithm, settings, evaluations with
intervals, data, cost, commit."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vapo_megatron.checkpoint.checkpoints import FINAL, exported_step, final_step
from vapo_megatron.config.model import TrainableConfig
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.facts import environment_facts
from vapo_megatron.monitoring.metrics import read_metrics, totals
from vapo_megatron.weights.hf_writer import CARD as CARD
from vapo_megatron.weights.hf_writer import MARK as MARK
from vapo_megatron.weights.hf_writer import is_own

# In evaluation.json of `vapo-megatron evaluate`: the step that the evaluated export was of then.
MODEL_STEP = "model_step"
_CACHED = re.compile(r"/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]+)")
_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def write_card(
    run_dir: Path,
    export: Path,
    config: TrainConfig | SftConfig,
    evaluations: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the card beside the weights of hf/<export>/<model>; one with changes of a user stays.

    Args:
        export: the model's directory.
        evaluations: contents of evaluation.json files of this model, besides the run's own.

    Raises:
        BadInput: the run's metrics cannot be read, or the card cannot be written.
    """
    path = export / CARD
    if is_own(path):
        return path
    text = model_card(run_dir, export, config, evaluations)
    with atomic_write(path) as file:
        file.write(text)
    return path


def model_card(
    run_dir: Path,
    export: Path,
    config: TrainConfig | SftConfig,
    evaluations: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text of a card; arguments and errors as in write_card."""
    rows = read_metrics(run_dir)
    step = _step_of(run_dir, export, rows)
    own = _read(run_dir / "evaluation.json")
    found = [*([own] if own.get("step") is not None else ()), *evaluations]
    is_critic = export.name == "critic"
    section: TrainableConfig = config.actor
    source = Path(config.model.path)
    if is_critic and isinstance(config, TrainConfig):
        section = config.critic
        source = config.critic_source[1]
    base = base_of(source)
    lines = [
        "---",
        yaml.safe_dump(_front(base, is_critic), sort_keys=False).rstrip(),
        "---",
        MARK,
        "",
        f"# {config.run.name}",
        "",
        f"{_what(export.name)} of a run of vapo_megatron{f', after step {step}' if step else ''}.",
        "",
        "## Base model",
        "",
        *_base_lines(base),
        "",
        *_evaluation_lines(found, rows, step),
        "## Training",
        "",
        *_table(("setting", "value"), (*_settings(config, section, rows, step), _code(run_dir))),
        "",
        "## Data",
        "",
        *(f"- `{name}`" for name in _data(config)),
        "",
        *_prompt_lines(config),
        *_use_lines(export.name),
    ]
    return "\n".join(lines).rstrip() + "\n"


def base_of(path: Path) -> dict[str, str]:
    """What a model directory says of itself: name, revision, licence; those that are known.

    A directory in the cache of the Hugging Face Hub has its name and commit; others the name in
    their config.json or their folder's.
    """
    facts: dict[str, str] = {"name": path.name}
    config = _read(path / "config.json")
    named = str(config.get("_name_or_path") or "")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", named):
        facts["hub"] = named
    if (match := _CACHED.search(f"{path.resolve()}/")) is not None:
        facts["hub"] = f"{match['owner']}/{match['name']}"
        facts["revision"] = match["commit"]
    if (origin := _read(path / "origin.json")).get("source"):
        facts["source"] = str(origin["source"])
    front = _front_of(path / CARD)
    for key in ("license", "license_name", "license_link"):
        if isinstance(front.get(key), str):
            facts[key] = front[key]
    return facts


def _front_of(card: Path) -> dict[str, Any]:
    if not card.is_file():
        return {}
    match = _FRONT.match(card.read_text(encoding="utf-8", errors="replace"))
    try:
        front = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError:
        return {}
    return front if isinstance(front, dict) else {}


def _front(base: Mapping[str, str], is_critic: bool) -> dict[str, Any]:
    """The metadata of the Hub."""
    front: dict[str, Any] = {
        key: base[key] for key in ("license", "license_name", "license_link") if key in base
    }
    if "hub" in base:
        front["base_model"] = base["hub"]
    front["library_name"] = "transformers"
    front["pipeline_tag"] = "token-classification" if is_critic else "text-generation"
    front["tags"] = ["vapo_megatron", "reinforcement-learning"]
    return front


def _what(model: str) -> str:
    kinds = {"critic": "The critic (value model)", "actor_adapter": "The adapters (LoRA)"}
    return kinds.get(model, "The policy")


def _base_lines(base: Mapping[str, str]) -> Iterator[str]:
    name = base.get("hub") or base.get("source") or base["name"]
    revision = f", revision `{base['revision']}`" if "revision" in base else ""
    yield f"`{name}`{revision}."
    if "license" in base:
        yield f"Its licence: `{base.get('license_name', base['license'])}`."
    else:
        yield "Its licence is not stated beside its weights: look it up before you pass this on."


def _evaluation_lines(
    evaluations: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], step: int | None
) -> Iterator[str]:
    yield "## Evaluation"
    yield ""
    if not evaluations:
        yield "None was made."
        yield ""
        return
    lines = []
    for evaluation in evaluations:
        sampling = evaluation.get("sampling", {})
        how = f"temperature {sampling.get('temperature')}, top_p {sampling.get('top_p')}"
        if (evaluated := evaluation.get("step", evaluation.get(MODEL_STEP))) not in (None, step):
            how += f", of step {evaluated}"
        for entry in evaluation.get("sets", ()):
            lines.append(_evaluated(entry, rows, how))
    titles = (
        "set",
        "problems",
        "avg@k [95 % interval]",
        "before training",
        "pass@k",
        "maj@k",
        "tokens",
        "truncated",
        "sampling",
    )
    yield from _table(titles, lines)
    yield ""
    yield (
        "Shares of correct responses, graded by the run's verifier; intervals by bootstrap over "
        "problems."
    )
    yield ""


def _evaluated(
    entry: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], how: str
) -> tuple[str, ...]:
    name = f"{names.EVALUATION}{entry['name']}_avg@{entry['samples']}"
    before = next((row[name] for row in rows if row["step"] == 0 and name in row), None)
    return (
        entry["name"],
        str(entry["problems"]),
        f"{entry['avg_at_k']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}], k = "
        f"{entry['samples']}",
        "–" if before is None else f"{before:.3f}",
        f"{entry['pass_at_k']:.3f}",
        f"{entry['maj_at_k']:.3f}",
        f"{entry['response_length']:.1f}",
        f"{entry['truncated']:.1%}",
        how,
    )


def _settings(
    config: TrainConfig | SftConfig,
    section: TrainableConfig,
    rows: Sequence[Mapping[str, Any]],
    step: int | None,
) -> Iterator[tuple[str, str]]:
    """section: of the model that the card is of."""
    done = [row for row in rows if step is None or row["step"] <= step]
    if isinstance(config, TrainConfig):
        yield from _algorithm(config)
    else:
        yield "algorithm", "supervised fine-tuning"
        yield "batch", f"{config.data.batch_size} demonstrations"
    optimizer = section.optimizer
    yield "learning rate", f"{optimizer.lr:g}, {optimizer.decay}, {optimizer.warmup_steps} warm-up"
    yield "seed", str(config.run.seed)
    cost = totals(done)
    if cost.tokens:
        yield "response tokens", f"{cost.tokens:,.0f}"
    if cost.gpu_hours:
        yield "GPU-hours", f"{cost.gpu_hours:,.1f}"
    elif cost.hours:
        yield "hours, without GPUs", f"{cost.hours:,.1f}"
    rung = {name for row in done for name in row if name.startswith(names.ALARM) and row[name]}
    alarms = sorted(name.removeprefix(names.ALARM).replace("_", " ") for name in rung)
    yield "alarms", ", ".join(alarms) or "none"


def _code(run_dir: Path) -> tuple[str, str]:
    """What the run was computed by, which `push` may no longer be."""
    facts = _read(run_dir / "environment.json") or environment_facts()
    return "code", f"vapo-megatron {facts.get('vapo-megatron')}, commit {facts.get('commit')}"


def _algorithm(config: TrainConfig) -> Iterator[tuple[str, str]]:
    algorithm = config.algorithm
    advantage = algorithm.advantage
    loss = algorithm.policy_loss
    yield "algorithm", f"{config.preset or 'no preset'}, estimator {advantage.estimator}"
    if algorithm.uses_critic:
        policy, critic = advantage.lambda_policy, advantage.lambda_critic
        yield "critic", f"{config.critic.kind}, λ {critic} for it, {policy} for the policy"
    clip = f"clip {loss.clip_low:g} to {loss.clip_high:g}"
    yield "policy loss", f"{loss.kind}, {loss.aggregation}, {clip}"
    yield (
        "reward",
        f"{config.reward.verifier}: {config.reward.incorrect:g} or {config.reward.correct:g}",
    )
    batch = config.batch
    yield "step", f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} responses"
    sampling = config.sampling
    yield (
        "responses",
        f"temperature {sampling.temperature:g}, at most {sampling.max_new_tokens} tokens",
    )


def _data(config: TrainConfig | SftConfig) -> list[str]:
    """Names of files; folders of a user's own are nobody's business."""
    if not isinstance(config, TrainConfig):
        return [_public(config.data.path)]
    weights = config.data.weights
    return [
        _public(str(path)) + (f", weight {weights[str(path)]:g}" if weights else "")
        for path in config.data.train_files
    ]


def _public(path: str) -> str:
    return path if path.startswith("hub:") else Path(path).name


def _prompt_lines(config: TrainConfig | SftConfig) -> Iterator[str]:
    prompt = config.data.prompt
    if prompt.user_template == "{problem}" and prompt.system_prompt is None:
        return
    yield "## Prompt"
    yield ""
    for text in (prompt.system_prompt, prompt.user_template):
        if text is not None:
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            yield from (fence, text, fence)
            yield ""


def _use_lines(model: str) -> Iterator[str]:
    if model != "actor":
        return
    yield "## Use"
    yield ""
    yield "```python"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
    yield ""
    yield 'tokenizer = AutoTokenizer.from_pretrained("PATH")'
    yield 'model = AutoModelForCausalLM.from_pretrained("PATH", dtype="auto")'
    yield "```"


def _step_of(run_dir: Path, export: Path, rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The step that an export is of; None where it is not known."""
    if export.parent.name == FINAL:
        return final_step(run_dir) or (rows[-1]["step"] if rows else None)
    return exported_step(export.parent)


def _table(titles: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
