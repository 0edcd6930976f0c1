"""Megatron's optimizer step, given up before anything is written where its gradient is refused."""

from collections.abc import Callable
from typing import Any


class GuardedStep:
    """Stands between the two halves of an optimizer's step: gradients, their norm and the clip; then weights.

    Megatron's own step runs, with the same numbers; where it would begin to write (step_with_ready_grads, which updates
    weights and moments of all optimizers of a chain and gathers them), `accepts` is asked first.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._apply = optimizer, optimizer.step_with_ready_grads
        name = "get_grad_norm" if hasattr(optimizer, "chained_optimizers") else "clip_grad_norm"
        self._measure: Callable[..., float] = getattr(optimizer, name)
        setattr(optimizer, name, self._measured)
        optimizer.step_with_ready_grads = self._apply_if_accepted
        self._accepts: Callable[[float], bool] = lambda norm: True
        self._norms: list[float] = []

    def __call__(self, accepts: Callable[[float], bool]) -> tuple[float, bool]:
        """Collective: the norm of the gradient before its clip, and whether the step was made.

        accepts has to say the same on every rank.
        """
        self._accepts = accepts
        self._norms.clear()
        updated, _, _ = self._optimizer.step()
        return self._norms[0], bool(updated)

    def _measured(self, *args: Any) -> float:
        self._norms.append(float(self._measure(*args)))
        return self._norms[-1]

    def _apply_if_accepted(self) -> bool:
        if not self._norms:  # optimizer.clip_grad=0: nobody has asked for it yet
            self._norms.append(float(self._optimizer.get_grad_norm()))
        return bool(self._accepts(self._norms[0]) and self._apply())
