"""Estimators and policy losses by name. A name stands once: in the decorator beside its formula.

    @estimator("rloo", groups=True)
    def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor: ...

The config refuses a wrong name before anything imports torch. So names and traits are read from the
source of this package, without importing it; `Registry.formula` imports the module of the one
formula that a run uses.
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

HERE = Path(__file__).parent

Formula = TypeVar("Formula", bound=Callable[..., Any])
Traits = TypeVar("Traits", bound="EstimatorTraits | LossTraits")


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits:
    """Properties of an advantage estimator that config and trainer ask for.

    Attributes:
        critic: reads the values of a critic.
        groups: compares a response with the others of its prompt, and is refused with one response
            per prompt.
        greedy: reads the reward of the greedy response to each prompt.
        per_token: gives an advantage for each token; the others give one for each response.
        discounts: reads gamma.
        selects: 1 for the responses that carry loss, 0 for those that are left out of it.
    """

    critic: bool = False
    groups: bool = False
    greedy: bool = False
    per_token: bool = False
    discounts: bool = False
    selects: bool = False


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Properties of a policy loss that config and trainer ask for.

    Attributes:
        rollout_ratio: its ratio is to the policy that drew the token, of whatever age.
        per_sequence: its ratio is the response's; it gets PolicyTerms.sequence_log_ratio.
        dual_clip: it has a dual clip.
    """

    rollout_ratio: bool = False
    per_sequence: bool = False
    dual_clip: bool = False


class Registry(Generic[Traits]):
    """The formulas of one kind in this package.

    Attributes:
        traits: by name, in the order of modules and of the lines in them.
    """

    def __init__(self, decorator: str, kind: type[Traits]) -> None:
        self.traits: dict[str, Traits] = {}
        self._kind = kind
        self._modules: dict[str, str] = {}
        self._formulas: dict[str, Callable[..., Any]] = {}
        for module, name, flags in _decorated_with(decorator):
            if name in self.traits:
                raise ValueError(f"@{decorator}({name!r}): {module} and {self._modules[name]}")
            self.traits[name] = kind(**flags)
            self._modules[name] = module

    def names(self, **flags: bool) -> tuple[str, ...]:
        """The names whose traits are these; all names without any."""
        return tuple(
            name
            for name, traits in self.traits.items()
            if all(getattr(traits, flag) == value for flag, value in flags.items())
        )

    def either(self, **flags: bool) -> str:
        """The names as a condition of the config has them: `rloo|raft`."""
        return "|".join(self.names(**flags))

    def register(self, name: str, **flags: bool) -> Callable[[Formula], Formula]:
        """The decorator: name and flags are literals, and flags are traits."""

        def decorate(formula: Formula) -> Formula:
            if self.traits.get(name) != self._kind(**flags):
                raise ValueError(f"{name!r}: write name and flags of its decorator as literals")
            self._formulas[name] = formula
            return formula

        return decorate

    def formula(self, name: str) -> Callable[..., Any]:
        """The function that is registered under a name."""
        importlib.import_module(self._modules[name])
        return self._formulas[name]


def call_with(formula: Callable[..., Any], known: dict[str, Any]) -> Any:
    """Call a formula with what its parameters are named after; those with a default may be
    unknown."""
    parameters = inspect.signature(formula).parameters
    return formula(**{name: known[name] for name in parameters if name in known})


def _decorated_with(decorator: str) -> Iterator[tuple[str, str, dict[str, bool]]]:
    """Module, name and flags of every function of this package with this decorator."""
    for path in sorted(HERE.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if f"\n@{decorator}(" not in source:
            continue
        module = f"{__package__}.{path.stem}"
        for function in ast.parse(source).body:
            for call in getattr(function, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                    flags = {str(flag.arg): ast.literal_eval(flag.value) for flag in call.keywords}
                    yield module, ast.literal_eval(call.args[0]), flags


ESTIMATORS = Registry("estimator", EstimatorTraits)
POLICY_LOSSES = Registry("policy_loss", LossTraits)
estimator = ESTIMATORS.register
policy_loss = POLICY_LOSSES.register
