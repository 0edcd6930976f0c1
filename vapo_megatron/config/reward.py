"""How responses are verified."""

from typing import Literal

from pydantic import Field, model_validator

from vapo_megatron.config.base import Section


class RewardConfig(Section):
    """The verifier, what its grade is worth, and the processes that it runs in."""

    verifier: Literal["math", "code", "code_share", "function"] = Field(
        "math",
        description="built-in mathematics; Python code that passes the tests in a row's answer, all of them (code) or "
        "a share (code_share); or a function of one's own",
    )
    function: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="package.module:name of f(problem, answer, response, extra) -> float | bool",
    )
    grade_truncated: bool = Field(
        False,
        description="a function is asked about responses that were cut off, too, with extra['truncated']; false: they "
        "count as incorrect unseen",
    )
    correct_above: float | None = Field(
        0.5,
        description="a function's score above this counts as correct; null: its scores are no grades, and no "
        "response counts as correct",
    )
    answer_format: Literal["auto", "marked", "boxed", "answer_line", "answer_tag", "hash"] = Field(
        "marked",
        description="where the answer stands: the last of all markers (marked), the same or else the free text (auto), "
        "or one of \\boxed{}, 'Answer:', <answer>, ####",
    )
    correct: float = Field(1.0, description="reward of a correct response (not with verifier=function)")
    incorrect: float = Field(-1.0, description="reward of any other response, and of one whose verification failed")
    workers: int = Field(4, ge=1, description="verifier processes, started when first needed")
    response_timeout_s: float = Field(
        5.0,
        gt=0,
        description="time for one response, then its worker is replaced: for mathematics time of its processor, and "
        "ten times that by the clock; for a function, or all tests of code, by the clock",
    )
    memory_mib: int = Field(2048, ge=256, description="address space of a worker, and of the code that it tests, MiB")

    @model_validator(mode="after")
    def _function_is_named(self) -> "RewardConfig":
        if (self.verifier == "function") != (self.function is not None):
            raise ValueError(
                f"verifier={self.verifier} with function={self.function}: "
                "set verifier=function and function=package.module:name together, or neither"
            )
        if self.verifier != "function" and self.grade_truncated:
            raise ValueError(
                f"grade_truncated=true with verifier={self.verifier}: an answer that was cut off is none, remove it"
            )
        if self.verifier != "function" and self.correct_above is None:
            raise ValueError(
                f"correct_above=null with verifier={self.verifier}: its grade is correct or not, remove it"
            )
        return self
