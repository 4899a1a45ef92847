"""How long vLLM takes to compute a prompt's tokens, learnt from its own steps.

The scheduler knows what a step computes and a worker how long its forward took;
``PrefillRate`` puts the two together. A sidecar that knows it can tell whether a
page that lies on a disk, or on another machine, would come later than computing it.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

# A step counts if prompts are most of it; generated tokens cost what they cost
# however few prompt tokens there are beside them.
_PROMPT_SHARE = 0.5
_FEWEST_TOKENS = 16
# The first steps may compile, allocate and fault in: the fastest of so many is the start.
_WARM_UP_STEPS = 3
# After so many prompt tokens what was seen before counts half.
_HALF_LIFE_TOKENS = 32768
# How far one step may lie from what is known: it was held up, or hardly measured.
_OUTLIER = 3.0


class PrefillRate:
    """Seconds of forward per prompt token. For one thread.

    The slope of a line through the origin that fits ``seconds = slope * tokens``
    best by least squares, older steps weighing exponentially less. Long steps so
    weigh most, and what every step costs, however short, least.
    """

    def __init__(self) -> None:
        self._slope = 0.0
        self._squares = 0.0  # decayed sum of tokens * tokens
        self._products = 0.0  # and of tokens * seconds
        self._first: list[tuple[int, float]] = []

    @property
    def seconds_per_token(self) -> float:
        """0 while it is not known."""
        return self._slope

    @staticmethod
    def tells(prompt_tokens: int, all_tokens: int) -> bool:
        """Whether a step of so many tokens is worth timing."""
        return prompt_tokens >= _FEWEST_TOKENS and prompt_tokens >= _PROMPT_SHARE * all_tokens

    def add(self, prompt_tokens: int, seconds: float) -> None:
        """Take in a step's forward."""
        if prompt_tokens <= 0 or not seconds > 0:
            return
        if self._slope == 0:
            self._first.append((prompt_tokens, seconds))
            if len(self._first) < _WARM_UP_STEPS:
                return
            prompt_tokens, seconds = min(self._first, key=lambda step: step[1] / step[0])
            self._first.clear()
        else:
            usual = self._slope * prompt_tokens
            seconds = min(max(seconds, usual / _OUTLIER), usual * _OUTLIER)
        keep = 0.5 ** (prompt_tokens / _HALF_LIFE_TOKENS)
        self._squares = keep * self._squares + prompt_tokens * prompt_tokens
        self._products = keep * self._products + prompt_tokens * seconds
        self._slope = self._products / self._squares
