"""A critic without a model: a small head on the actor's hidden states (after POISE, arXiv
2605.07579).

The pass that computes log-probs returns the last hidden states of response tokens
(Trainable.score), without gradients, and they stay with their samples until the critic's update.
Every rank has the whole head and computes its own samples with it, so the layouts of actor and
rollout play no part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from vapo_megatron.config.model import CriticConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.errors import BadInput
from vapo_megatron.files import atomic_write
from vapo_megatron.megatron.optimizer import BETAS, make_scheduler
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.token_loss import MetricTotals, StepResult, TokenLoss, sum_over_ranks

PROBE_FILE = "probe.safetensors"
_TOKENS = 1 << 14  # that are on the device at a time


class ProbeHead(torch.nn.Module):
    """Hidden states [t, width] -> outputs [t, n], in fp32: values, or logits of a histogram.

    layer: of the policy, from 1, whose output it reads; 0: the last hidden states, behind the final
        norm.
    """

    def __init__(self, width: int, units: int, outputs: int, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.inner = torch.nn.Linear(width, units)
        self.outer = torch.nn.Linear(units, outputs)

    def extra_repr(self) -> str:
        """Part of repr, by which heads are compared."""
        return f"layer={self.layer}"

    @torch.no_grad()
    def draw(self, seed: int, std: float) -> None:
        """New weights, of this seed alone. std: of the outer layer."""
        generator = torch.Generator().manual_seed(seed)
        for layer, deviation in ((self.inner, self.inner.in_features**-0.5), (self.outer, std)):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * deviation)
            layer.bias.zero_()

    def forward(self, states: Tensor) -> Tensor:
        states = F.rms_norm(states.float(), states.shape[1:], eps=1e-6)
        values: Tensor = self.outer(F.silu(self.inner(states)))
        return values


@dataclass(frozen=True)
class _Rows:
    """LocalTokens of some response tokens of a batch."""

    rows: slice

    def gather(self, values: Tensor) -> Tensor:
        return values[self.rows].to(current_platform().device)

    def sequence_mean(self, x: Tensor) -> Tensor:
        raise AssertionError("no value loss takes the mean over a response")


class Probe:
    """The head with its optimizer, the same on every rank; scored and trained as a critic that is a
    model."""

    name = "critic"
    dtype = torch.float32
    replays = False

    def __init__(
        self, config: CriticConfig, width: int, outputs: int, std: float, seed: int
    ) -> None:
        """width: of the actor's hidden states; outputs: ValueLossConfig.outputs; std: of the new
        head."""
        self.config = config
        settings = config.optimizer
        self.head = ProbeHead(width, config.probe.width, outputs, config.probe.layer or 0)
        self.head.draw(seed, std)
        self.head.to(current_platform().device)
        self.accepts: Callable[[str, float, dict[str, float]], bool] = (
            lambda name, grad_norm, metrics: True
        )
        parameters = list(self.head.parameters())
        groups: list[dict[str, Any]] = [
            {"params": parameters[::2]},
            {"params": parameters[1::2], "wd_mult": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=BETAS,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._scheduler: OptimizerParamScheduler = make_scheduler(settings, self._adam)
        self._scheduler.step(0)

    @property
    def updates(self) -> int:
        """Optimizer steps made, earlier attempts included."""
        return int(self._scheduler.num_steps)

    def head_has_gradient(self) -> bool:
        """Whether the last train_step brought the head a gradient, on any rank."""
        return any(bool(p.grad.any()) for p in self.head.parameters() if p.grad is not None)

    @torch.no_grad()
    def score(
        self,
        batch: ExperienceBatch,
        on_done: Callable[[int], None] | None = None,
        read: Callable[[Tensor], Tensor] | None = None,
        share: Sequence[int] = (),
    ) -> Tensor:
        """Values of the states before the response tokens of a batch, float32 [T, 1]; as
        Trainable.score."""
        values = [torch.zeros(0, 1)]
        for rows in _parts(batch):
            outputs = self.head(_states(batch, rows))
            values.append((outputs[:, 0] if read is None else read(outputs))[:, None].cpu())
        if on_done is not None:
            on_done(len(share))
        return torch.cat(values)

    def train_step(
        self,
        batch: ExperienceBatch,
        share: Sequence[int],
        loss: TokenLoss,
        keep_outputs: bool = False,
    ) -> StepResult:
        """Collective: one optimizer step on the samples that ranks have of a mini-batch; as
        Trainable.train_step."""
        parameters = list(self.head.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        totals = MetricTotals(loss, current_platform().device)
        outputs = [torch.zeros(0, self.head.outer.out_features)]
        for rows in _parts(batch):
            values = self.head(_states(batch, rows))
            total, metrics = loss(values, _Rows(rows))
            torch.autograd.backward(total)
            totals.add(metrics)
            outputs.append(values.detach().cpu())
        summed = sum_over_ranks(
            torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).double()
        )
        norm = float(summed.norm())
        clip = self.config.optimizer.clip_grad
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for parameter, part in zip(
            parameters, (summed * scale).split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter).to(parameter)
        reported = totals.over_ranks()
        updated = self.accepts(self.name, norm, reported)
        if updated:
            self._scheduler.step(1)
            self._adam.step()
        lr = float(self._adam.param_groups[0]["lr"])
        return StepResult(norm, lr, reported, torch.cat(outputs) if keep_outputs else None, updated)

    def state(self) -> bytes:
        """Weights, moments and count of updates, for a checkpoint."""
        tensors = {"updates": torch.tensor(self.updates)}
        for name, parameter in self.head.named_parameters():
            moments = self._adam.state.get(parameter, {})
            tensors |= {
                f"{name}.{key}": moments[key].cpu() for key in ("exp_avg", "exp_avg_sq") if moments
            }
            tensors[name] = parameter.detach().cpu()
        return save(tensors)

    def load(self, state: bytes) -> None:
        """Go on from state()."""
        tensors = load(state)
        updates = int(tensors["updates"])
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                parameter.copy_(tensors[name])
                if updates:
                    moments = {
                        key: tensors[f"{name}.{key}"].to(parameter)
                        for key in ("exp_avg", "exp_avg_sq")
                    }
                    self._adam.state[parameter] = {"step": torch.tensor(float(updates)), **moments}
        self._scheduler.num_steps = 0
        self._scheduler.step(updates)

    def start_from(self, folder: Path) -> None:
        """Take the head that an earlier run exported; raises BadInput where it is another one's."""
        saved = read_probe(folder / PROBE_FILE)
        if repr(saved) != repr(self.head):
            raise BadInput(
                f"critic.init_path={folder}: its head is {' '.join(repr(saved).split())}, expected "
                f"{' '.join(repr(self.head).split())}: give one that was trained with this policy, "
                "probe and value loss"
            )
        self.head.load_state_dict(saved.state_dict())

    def export(self, folder: Path) -> None:
        """Write the head alone, for read_probe; one rank does."""
        with atomic_write(folder / PROBE_FILE, "wb") as file:
            weights = {name: p.detach().cpu() for name, p in self.head.named_parameters()}
            file.write(save(weights | {"layer": torch.tensor(self.head.layer)}))


def read_probe(path: Path) -> ProbeHead:
    """An exported head: it takes the hidden states (ProbeHead.layer) of the policy that was
    exported with it.

    Raises:
        BadInput: the file is not one.
    """
    try:
        tensors = load_file(path)
        units, width = tensors["inner.weight"].shape
        layer = int(tensors.pop("layer", torch.tensor(0)))
        head = ProbeHead(width, units, tensors["outer.weight"].shape[0], layer)
        head.load_state_dict(tensors)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise BadInput(
            f"{path}: expected a probe as `vapo-megatron train` exports it, not: {error}"
        ) from None
    return head


def _parts(batch: ExperienceBatch) -> list[slice]:
    return [slice(start, start + _TOKENS) for start in range(0, batch.response_tokens, _TOKENS)]


def _states(batch: ExperienceBatch, rows: slice) -> Tensor:
    assert batch.hidden_states is not None, "no hidden states: the policy is scored first"
    return batch.hidden_states[rows].to(current_platform().device)
