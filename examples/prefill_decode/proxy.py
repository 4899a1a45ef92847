"""Sends a request to the prefiller first, then to the decoder: python -m
examples.prefill_decode.proxy.

Serves OpenAI's completions and chat completions. The prefiller is asked for one token and is told,
in kv_transfer_params, that its prompt is handed over; what its answer says is stored goes to the
decoder with the request. The decoder's answer is passed through as it comes, streamed or not.

Nothing depends on the prefiller: where it is down, late or says no, the decoder computes the prompt
by itself, and the prefiller is left alone for a moment. A client that leaves ends its request on
either server.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

logger = logging.getLogger("proxy")

ROUTES = ("/v1/completions", "/v1/chat/completions")
# What says how the answer is to look is the decoder's; some of it is refused with one token.
_ANSWER_ONLY = (
    "best_of", "echo", "logprobs", "min_tokens", "prompt_logprobs", "return_token_ids",
    "stream_options",
    "top_logprobs", "use_beam_search",
)  # fmt: skip
_PASSED_HEADERS = ("Authorization", "X-Request-Id", "traceparent", "tracestate")
_CONNECT_TIMEOUT_S = 2.0
_MAX_BODY_BYTES = 64 << 20


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The request to the prefiller: its prompt, and one token."""
    out = {key: value for key, value in body.items() if key not in _ANSWER_ONLY}
    out |= {"max_tokens": 1, "stream": False}
    if "n" in out:
        out["n"] = 1
    if "max_completion_tokens" in out:
        out["max_completion_tokens"] = 1
    out["kv_transfer_params"] = {**(body.get("kv_transfer_params") or {}), "do_remote_decode": True}
    return out


def has_one_prompt(body: dict[str, Any]) -> bool:
    """Whether a promise names the request's prompt: vLLM answers several prompts with the first
    one's."""
    prompt = body.get("prompt")
    return (
        not isinstance(prompt, list)
        or len(prompt) == 1
        or all(isinstance(each, int) for each in prompt)
    )


class Proxy:
    """One prefiller and one decoder. For the event loop's thread alone."""

    def __init__(
        self, prefiller: str, decoder: str, prefill_timeout_s: float, retry_s: float
    ) -> None:
        """URLs without a path. retry_s: how long a prefiller that failed is left alone."""
        self._prefiller = prefiller.rstrip("/")
        self._decoder = decoder.rstrip("/")
        self._prefill_timeout = aiohttp.ClientTimeout(
            total=prefill_timeout_s, sock_connect=_CONNECT_TIMEOUT_S
        )
        self._decode_timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        self._retry_s = retry_s
        self._down_until = 0.0
        self._numbers = itertools.count(1)
        self._http: aiohttp.ClientSession

    def app(self) -> web.Application:
        """The application to run."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        for route in ROUTES:
            app.router.add_post(route, self._complete)
        for route in ("/health", "/v1/models"):
            app.router.add_get(route, self._pass_through)
        app.cleanup_ctx.append(self._connections)
        return app

    async def _connections(self, _: web.Application) -> AsyncIterator[None]:
        # A connection for each request: one that is kept may be closed by the server just when it
        # is used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._http:
            yield

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("kv_transfer_params") or {}, dict):
            return _error(400, "the body is not a JSON object of a completion")
        number = next(self._numbers)
        headers = {
            name: request.headers[name] for name in _PASSED_HEADERS if name in request.headers
        }
        started = time.monotonic()
        params = await self._prefill(number, request.path, body, headers)
        prefilled = time.monotonic()
        if params and has_one_prompt(body):
            body["kv_transfer_params"] = {**(body.get("kv_transfer_params") or {}), **params}
        out: web.StreamResponse | None = None
        try:
            async with self._http.post(
                self._decoder + request.path,
                json=body,
                headers=headers,
                timeout=self._decode_timeout,
            ) as answer:
                head = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
                head["X-Prefill-Seconds"] = f"{prefilled - started:.4f}"
                first = 0.0
                async for data in answer.content.iter_any():
                    try:
                        if out is None:
                            first = time.monotonic()
                            out = web.StreamResponse(status=answer.status, headers=head)
                            await out.prepare(request)
                        await out.write(data)
                    except ConnectionResetError:
                        break  # the client has left, which cancels this soon
                logger.info(
                    "request %d: %d, prefill %.3f s, first byte %.3f s later, %.3f s in all",
                    number,
                    answer.status,
                    prefilled - started,
                    (first or time.monotonic()) - prefilled,
                    time.monotonic() - started,
                )
                return out or web.Response(status=answer.status, headers=head)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.error("request %d: the decoder failed: %s", number, _words(error))
            if out is not None:
                raise  # the client sees its answer cut off
            return _error(502, "the decoder does not answer")

    async def _prefill(
        self, number: int, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """Has the prompt computed and stored. The prefiller's kv_transfer_params, None without."""
        if time.monotonic() < self._down_until:
            return None
        try:
            async with self._http.post(
                self._prefiller + path,
                json=prefill_body(body),
                headers=headers,
                timeout=self._prefill_timeout,
            ) as answer:
                if answer.status < 400:
                    params = (await answer.json()).get("kv_transfer_params")
                    return params if isinstance(params, dict) else None
                if answer.status < 500:
                    # The client's mistake, most likely: the decoder will say so.
                    logger.info(
                        "request %d: the prefiller refuses it with %d", number, answer.status
                    )
                    return None
                why = f"it answers {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            why = _words(error)
        self._down_until = time.monotonic() + self._retry_s
        logger.warning(
            "request %d: the prefiller failed, the decoder computes by itself for %g s: %s",
            number,
            self._retry_s,
            why,
        )
        return None

    async def _pass_through(self, request: web.Request) -> web.Response:
        try:
            async with self._http.get(
                self._decoder + request.path, timeout=self._prefill_timeout
            ) as answer:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type=answer.content_type
                )
        except (aiohttp.ClientError, OSError, TimeoutError):
            return _error(502, "the decoder does not answer")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _error(status: int, message: str) -> web.Response:
    """As OpenAI's API answers errors."""
    return web.json_response(
        {"error": {"message": message, "type": "proxy_error", "code": status}}, status=status
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.prefill_decode.proxy",
        description="Prefill on one vLLM server, decode on another.",
    )
    parser.add_argument(
        "--prefiller", required=True, help="URL of the vLLM server that is a kv_producer"
    )
    parser.add_argument(
        "--decoder", required=True, help="URL of the vLLM server that is a kv_consumer"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--prefill-timeout", type=float, default=120, help="seconds for a prefill (default 120)"
    )
    parser.add_argument(
        "--retry",
        type=float,
        default=1,
        help="seconds that a prefiller which failed is left alone (default 1)",
    )
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    proxy = Proxy(args.prefiller, args.decoder, args.prefill_timeout, args.retry)
    # Cancellation: a client that leaves ends its request upstream.
    web.run_app(
        proxy.app(),
        host=args.host,
        port=args.port,
        handler_cancellation=True,
        access_log=None,
        print=logger.info,
    )


if __name__ == "__main__":
    main()
