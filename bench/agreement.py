"""What `lookaside.compress` does to answers: how often the next token stays what it was.

The text is this repository's documents, cut into prompts. For each way of keeping pages a server
computes and stores every prompt, empties its own cache, loads it and answers greedily. Its answers
are compared with those that follow pages kept as they are:

  next token        share of next tokens that are the same, each after the prompt and the same
                    tokens of the answer before it
  until different   tokens until a free answer differs, the mean of the prompts; the limit is the
                    length of the answers
  log probability   mean distance of the most likely token's log probability, where it is the same

`computed` are answers without a load, which rounding in another order makes different too. With
random weights the next token is mostly a close call: give a real model with --model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import httpx

from bench._report import REPO, Report, arguments
from examples.stand import client, model
from examples.stand.processes import Server, Stand, connector_config, eventually
from examples.stand.progress import say

PAGE = 128  # vLLM's block on the CPU, in tokens
PATIENT: dict[str, Any] = {"lookup_timeout_ms": 10_000, "store_timeout_ms": 10_000}
WAYS = ("none", "lossless", "int8", "fp8")


class Token(NamedTuple):
    """A next token, and its log probability."""

    text: str
    token: int
    logprob: float


class Answers(NamedTuple):
    """What one server answered to all prompts."""

    free: list[tuple[int, ...]]
    forced: list[list[Token]]
    """The next tokens after the first tokens of the truth, by prompt."""


def prompts(where: Path, count: int, tokens: int) -> list[list[int]]:
    """Prompts of the documents' text, in the model's tokens."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(where)
    made: list[list[int]] = []
    for document in sorted((REPO / "docs").glob("*.md")):
        ids = tokenizer(document.read_text()[: tokens * 12]).input_ids
        made += [ids[i : i + tokens] for i in range(0, len(ids) - tokens + 1, tokens)][:2]
    if len(made) < count:
        raise SystemExit(f"the documents have text for {len(made)} prompts of {tokens} tokens")
    return made[:count]


def next_token(server: Server, prompt: Sequence[int], salt: str | None = None) -> Token:
    """The most likely next token."""
    body: dict[str, Any] = {
        "model": "small",
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    if salt is not None:
        body["cache_salt"] = salt
    reply = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=300)
    reply.raise_for_status()
    (choice,) = reply.json()["choices"]
    logprobs = choice["logprobs"]
    return Token(choice["text"], choice["token_ids"][0], logprobs["token_logprobs"][0])


def answers(
    server: Server,
    asked: list[list[int]],
    length: int,
    truth: list[tuple[int, ...]] | None,
    computed: bool = False,
) -> Answers:
    """What a server answers to each prompt once it has loaded it, or computed it. Without a truth,
    its own answers are the truth."""
    out = Answers([], [])
    for number, prompt in enumerate(asked):
        salt = f"computed-{number}" if computed else None
        whole = (len(prompt) - 1) // PAGE * PAGE
        answer = client.complete(server.base_url, prompt, max_tokens=length, cache_salt=salt)
        if not computed:

            def loaded(prompt: list[int] = prompt, whole: int = whole) -> bool:
                nonlocal answer
                client.reset_prefix_cache(server.base_url)
                answer = client.complete(server.base_url, prompt, max_tokens=length)
                return answer.cached_tokens == whole

            eventually(loaded, f"a hit of {whole} tokens")
        out.free.append(answer.tokens)
        follow = answer.tokens if truth is None else truth[number]
        # What was loaded is in vLLM's own cache now, as it was decoded.
        out.forced.append(
            [next_token(server, [*prompt, *follow[:i]], salt) for i in range(len(follow))]
        )
    return out


def compare(report: Report, name: str, truth: Answers, other: Answers) -> None:
    """Add what the answers of one way have in common with the truth."""
    pairs = [
        pair
        for ours, theirs in zip(truth.forced, other.forced, strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    same = [(a, b) for a, b in pairs if a.token == b.token]
    report.add(f"{name} next token", len(same) / len(pairs), "share", 1, len(same) / len(pairs), 0)
    until = []
    for ours, theirs in zip(truth.free, other.free, strict=True):
        differs = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        until.append(differs[0] if differs else len(ours))
    length = len(truth.free[0])
    report.add(f"{name} until different", fmean(until), "tokens", length, fmean(until) / length, 0)
    distance = fmean(abs(a.logprob - b.logprob) for a, b in same) if same else float("nan")
    report.add(f"{name} log probability", distance, "nats")
    share, nats = len(same) / len(pairs), distance
    say(f"{name}: {share:.1%} of {len(pairs)} next tokens, {nats:.4f} nats, until {until}")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, help="a model's directory (default: random weights)")
    parser.add_argument("--dtype", default="bfloat16", help="of the model (default bfloat16)")
    parser.add_argument("--prompts", type=int, default=8, help="how many (default 8)")
    parser.add_argument("--tokens", type=int, default=1000, help="of each (default 1000)")
    parser.add_argument("--answer", type=int, default=24, help="tokens answered (default 24)")
    options = parser.parse_args()
    where = options.model or model.ensure("llama")
    asked = prompts(where, options.prompts, options.tokens)
    report = Report("agreement")
    truth: Answers | None = None
    with Stand(where) as stand:
        stand.sidecar()
        for way in WAYS:
            if way == "lossless" and options.dtype == "float16":
                continue
            server = stand.server(
                way,
                connector=connector_config(stand.endpoint(), compress=way, **PATIENT),
                arguments=["--dtype", options.dtype],
                max_model_len=options.tokens + options.answer + PAGE,
            )
            server.wait_ready()
            say(f"pages kept as {way}: {len(asked)} prompts ...")
            found = answers(server, asked, options.answer, None if truth is None else truth.free)
            if truth is None:
                truth = found
                computed = answers(server, asked, options.answer, truth.free, computed=True)
                compare(report, "computed", truth, computed)
            else:
                compare(report, way, truth, found)
            server.end()
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
