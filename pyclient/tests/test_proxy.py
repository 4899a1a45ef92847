"""The proxy of examples/prefill_decode between servers that misbehave; in front of real ones it is
in e2e."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientPayloadError, web
from aiohttp.test_utils import TestClient, TestServer

from examples.prefill_decode.proxy import ROUTES, Proxy, has_one_prompt, prefill_body

PROMISE = {"lookaside": {"tokens": 7, "digest": "00"}}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Upstream:
    """A server that keeps what it was asked and answers as it is told to."""

    def __init__(self, answer: Handler) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self._answer = answer
        app = web.Application()
        for route in ROUTES:
            app.router.add_post(route, self._serve)
        self.server = TestServer(app)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        return await self._answer(request)


def answers(**fields: Any) -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(fields)

    return answer


async def fails(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "broken"}, status=500)


async def refuses(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "your mistake"}, status=400)


async def breaks_off(request: web.Request) -> web.StreamResponse:
    out = web.StreamResponse()
    await out.prepare(request)
    await out.write(b"data: 1\n\n")
    assert request.transport is not None
    request.transport.abort()
    return out


async def streams(request: web.Request) -> web.StreamResponse:
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await out.prepare(request)
    for number in range(3):
        await out.write(f"data: {number}\n\n".encode())
        await asyncio.sleep(0)
    return out


def between(
    prefiller: Upstream,
    decoder: Upstream,
    talk: Callable[[TestClient], Awaitable[None]],
    down: str = "",
    timeout_s: float = 60,
    retry_s: float = 60,
) -> None:
    """Talk to a proxy before these two, one of which may be down."""

    async def run() -> None:
        await prefiller.server.start_server()
        await decoder.server.start_server()
        urls = [str(each.server.make_url("")) for each in (prefiller, decoder)]
        for name, each in (("prefiller", prefiller), ("decoder", decoder)):
            if down == name:
                await each.server.close()
        proxy = Proxy(*urls, prefill_timeout_s=timeout_s, retry_s=retry_s)
        try:
            async with TestClient(TestServer(proxy.app())) as client:
                await talk(client)
        finally:
            await prefiller.server.close()
            await decoder.server.close()

    asyncio.run(run())


def test_what_the_prefiller_says_goes_to_the_decoder() -> None:
    prefiller, decoder = Upstream(answers(kv_transfer_params=PROMISE)), Upstream(streams)

    async def talk(client: TestClient) -> None:
        body = {
            "prompt": [1, 2],
            "max_tokens": 50,
            "min_tokens": 9,
            "stream": True,
            "n": 2,
            "seed": 5,
        }
        async with client.post(
            "/v1/completions", json=body, headers={"X-Request-Id": "r7", "Cookie": "c"}
        ) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert float(answer.headers["X-Prefill-Seconds"]) >= 0
            assert await answer.read() == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert decoder.bodies == [{**body, "kv_transfer_params": PROMISE}]

    between(prefiller, decoder, talk)
    (asked,) = prefiller.bodies
    assert asked == {
        "prompt": [1, 2], "max_tokens": 1, "stream": False, "n": 1, "seed": 5,
        "kv_transfer_params": {"do_remote_decode": True},
    }  # fmt: skip
    for upstream in (prefiller, decoder):
        assert upstream.headers[0]["X-Request-Id"] == "r7" and "Cookie" not in upstream.headers[0]


@pytest.mark.parametrize(
    "answer", [fails, breaks_off, answers(kv_transfer_params="x"), answers(), refuses]
)
def test_whatever_the_prefiller_does_the_decoder_answers(answer: Handler) -> None:
    prefiller, decoder = Upstream(answer), Upstream(answers(text="mine"))

    async def talk(client: TestClient) -> None:
        for _ in range(2):
            async with client.post("/v1/chat/completions", json={"messages": []}) as out:
                assert await out.json() == {"text": "mine"}

    between(prefiller, decoder, talk)
    assert decoder.bodies == [{"messages": []}] * 2
    # One that failed is left alone for a while; one that refused a request is not down.
    assert len(prefiller.bodies) == (1 if answer in (fails, breaks_off) else 2)


def test_a_prefiller_that_hangs_or_is_down() -> None:
    async def hangs(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    for prefiller, down in ((Upstream(hangs), ""), (Upstream(answers()), "prefiller")):
        decoder = Upstream(answers(text="mine"))

        async def talk(client: TestClient) -> None:
            async with client.post("/v1/completions", json={"prompt": "x"}) as out:
                assert await out.json() == {"text": "mine"}

        between(prefiller, decoder, talk, down, timeout_s=0.2)


def test_a_prefiller_that_comes_back_is_asked_again() -> None:
    prefiller, decoder = Upstream(fails), Upstream(answers(text="mine"))

    async def talk(client: TestClient) -> None:
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": "x"})

    between(prefiller, decoder, talk, retry_s=0)
    assert len(prefiller.bodies) == 2


def test_a_decoder_that_is_down_or_breaks_off() -> None:
    async def down(client: TestClient) -> None:
        async with client.post("/v1/completions", json={"prompt": "x"}) as out:
            assert out.status == 502 and "decoder" in (await out.json())["error"]["message"]
        assert (await client.get("/health")).status == 502

    async def cut(client: TestClient) -> None:
        with pytest.raises(ClientPayloadError):
            async with client.post("/v1/completions", json={"prompt": "x"}) as out:
                await out.read()

    between(Upstream(answers()), Upstream(answers()), down, "decoder")
    between(Upstream(answers()), Upstream(breaks_off), cut)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"kv_transfer_params": 7}'])
def test_what_is_no_completion_is_refused(body: bytes) -> None:
    prefiller, decoder = Upstream(answers()), Upstream(answers())

    async def talk(client: TestClient) -> None:
        assert (await client.post("/v1/completions", data=body)).status == 400

    between(prefiller, decoder, talk)
    assert not prefiller.bodies and not decoder.bodies


def test_a_client_that_leaves_ends_its_request_upstream() -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def waits(_: web.Request) -> web.StreamResponse:
        came.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            left.set()
            raise
        return web.Response()

    prefiller, decoder = Upstream(waits), Upstream(answers())

    async def talk(client: TestClient) -> None:
        asking = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        await asyncio.wait_for(came.wait(), 60)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(left.wait(), 60)

    between(prefiller, decoder, talk)
    assert not decoder.bodies


def test_one_prompt() -> None:
    assert all(
        has_one_prompt(body)
        for body in ({}, {"prompt": "x"}, {"prompt": [1, 2]}, {"prompt": ["x"]})
    )
    assert not any(
        has_one_prompt(body) for body in ({"prompt": ["x", "y"]}, {"prompt": [[1], [2]]})
    )
    chat = prefill_body({"max_completion_tokens": 9, "kv_transfer_params": {"other": 1}})
    assert chat["max_completion_tokens"] == 1 and chat["kv_transfer_params"] == {
        "other": 1,
        "do_remote_decode": True,
    }
    assert json.dumps(chat)
