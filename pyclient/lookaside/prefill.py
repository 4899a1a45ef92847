"""How long vLLM takes to compute a prompt's tokens, learnt from its own steps.

The scheduler knows what a step computes, and a worker how long its forward took. ``PrefillRate``
puts the two together. From it a sidecar can tell whether a page on a disk, or on another machine,
would arrive later than vLLM could compute it.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

# A step counts if prompts are most of it. Otherwise generated tokens would be most of its cost.
_PROMPT_SHARE = 0.5
_FEWEST_TOKENS = 16
# The first steps may compile, allocate and fault in. So the rate begins with the fastest of these.
_WARM_UP_STEPS = 3
# After so many prompt tokens what was seen before counts half.
_HALF_LIFE_TOKENS = 32768
# A step counts as this many times longer, or shorter, than expected at most: it may have been held
# up, or not measured well.
_OUTLIER = 3.0


class PrefillRate:
    """Seconds of forward per prompt token. For one thread.

    The slope of the line through the origin that fits ``seconds = slope * tokens`` best by least
    squares, with exponentially less weight for older steps. So long steps weigh most, and the cost
    that every step has, however short, weighs least.
    """

    def __init__(self) -> None:
        self._slope = 0.0
        self._squares = 0.0  # decayed sum of tokens * tokens
        self._products = 0.0  # decayed sum of tokens * seconds
        self._first: list[tuple[int, float]] = []

    @property
    def seconds_per_token(self) -> float:
        """The rate; 0 while it is not known."""
        return self._slope

    @staticmethod
    def is_worth_timing(prompt_tokens: int, all_tokens: int) -> bool:
        """Report whether a step of so many tokens is worth timing."""
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
