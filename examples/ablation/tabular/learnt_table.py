"""Tables that learn by AdamW, a table and an optimizer state for each seed."""

import torch
from torch import Tensor


class Adam:
    """AdamW without decay, (0.9, 0.95), gradient clipping at 1 for each seed; parameters are
    [seeds, ...]."""

    def __init__(self, parameters: list[Tensor], lr: float, warmup: int) -> None:
        self.parameters, self.lr, self.warmup, self.count = parameters, lr, warmup, 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        """Move the parameters against the gradient of a loss that is a sum over seeds."""
        gradients = torch.autograd.grad(loss, self.parameters)
        norm = torch.stack([g.square().flatten(1).sum(1) for g in gradients]).sum(0).sqrt()
        scale = (1 / norm.clamp(min=1)).view(-1, 1, 1)
        self.count += 1
        lr = self.lr * min(1, self.count / max(1, self.warmup))
        correction = 1 - 0.9**self.count, 1 - 0.95**self.count
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            g = g * scale
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.95).addcmul_(g, g, value=0.05)
            p -= lr * (m / correction[0]) / ((v / correction[1]).sqrt() + 1e-8)


class Table:
    """base + own + features @ shared: [seeds, rows, width], whose own and shared parts learn."""

    def __init__(self, base: Tensor, features: Tensor, own: bool, lr: float, warmup: int) -> None:
        seeds, _, width = base.shape
        self.base, self.features = base, features
        self.own = torch.zeros_like(base, requires_grad=True) if own else None
        self.shared = torch.zeros(seeds, features.shape[2], width, requires_grad=True)
        self.optimizer = Adam(
            [self.shared] if self.own is None else [self.shared, self.own], lr, warmup
        )

    def __call__(self) -> Tensor:
        common = self.base + self.features @ self.shared
        return common if self.own is None else common + self.own
