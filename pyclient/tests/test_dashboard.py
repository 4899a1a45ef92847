"""The dashboard in a browser: real sidecars, both roles of an engine with vLLM's scheduler, and
Chromium without a window.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from peer import until
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from scheduling import make_config, tokens
from test_engine import BINARY, Engine, Sidecar
from test_sidecar import status_of

from examples.stand.processes import free_port

PATIENCE_MS = 60_000
SIZES = ((1280, 900), (400, 850))
# What a browser logs by itself of a response that is no success, or of none.
FETCH_FAILED = "Failed to load resource"

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason="bin/lookaside is not built")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium is not None, "Chromium is missing: scripts/setup.sh test"
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(
            executable_path=chromium, args=[*options, "--disable-dev-shm-usage"]
        )
        yield opened
        opened.close()


class Watched:
    """A page, with what it logged, and where it sent requests."""

    def __init__(self, page: Page, address: str) -> None:
        page.set_default_timeout(PATIENCE_MS)
        self.page = page
        self.address = address
        self.logged: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.logged.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.logged.append(f"error: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))

    def open(self) -> None:
        self.page.goto(f"http://{self.address}/")

    def live(self) -> None:
        expect(self.page.locator("#state")).to_have_attribute(
            "data-state", "live", timeout=PATIENCE_MS
        )

    def raw(self, selector: str, value: float) -> None:
        """Wait until an element has a number."""
        expect(self.page.locator(selector)).to_have_attribute(
            "data-raw", str(value), timeout=PATIENCE_MS
        )

    def shows(self, numbers: dict[str, str]) -> bool:
        """Report whether the page has these numbers, by where they are."""
        script = "all => all.map(s => document.querySelector(s)?.dataset.raw)"
        return self.page.evaluate(script, list(numbers)) == list(numbers.values())

    def row(self, endpoint: Path) -> Locator:
        """Return a sidecar's row in the list."""
        return self.page.locator("#host tbody tr").filter(has_text=str(endpoint))

    def text(self, selector: str, text: str) -> None:
        expect(self.page.locator(selector)).to_have_text(text, timeout=PATIENCE_MS)

    def check(self, *accepted: str) -> None:
        """Nothing went wrong, but what is accepted, and nothing was fetched from elsewhere."""
        wrong = [line for line in self.logged if not any(a in line for a in accepted)]
        assert not wrong, wrong
        assert {urlsplit(url).netloc for url in self.asked} == {self.address}


Watch = Callable[..., Watched]


@pytest.fixture
def watch(browser: Browser) -> Iterator[Watch]:
    contexts = []

    def make(address: str, **options: Any) -> Watched:
        contexts.append(browser.new_context(**options))
        return Watched(contexts[-1].new_page(), address)

    yield make
    for context in contexts:
        context.close()


class Served(Sidecar):
    """A sidecar with a fixed port."""

    def __init__(self, endpoint: Path, *arguments: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        super().__init__(endpoint, "--admin-listen", self.address, *arguments)
        self.wait_serving()

    def end(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(name: str, *arguments: str) -> Served:
        made.append(Served(tmp_path / name, *arguments))
        return made[-1]

    yield start
    for sidecar in made:
        sidecar.end()


@pytest.fixture
def engine_of(model: Path) -> Iterator[Callable[[Served], Engine]]:
    made: list[Engine] = []

    def make(sidecar: Served) -> Engine:
        extra = {
            "lookaside.endpoint": str(sidecar.endpoint),
            "lookaside.lookup_timeout_ms": 60_000,  # the machine is shared
            "lookaside.store_timeout_ms": 60_000,
            "lookaside.load_timeout_ms": 60_000,
        }
        made.append(Engine(make_config(model, extra)))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def shown(status: dict[str, Any]) -> dict[str, str]:
    """What the page shows of a status, by where it is."""
    counters, (disk,), misses = status["counters"], status["tiers"], status["misses"]
    blue = next(each for each in status["tenants"] if each["name"] == "blue")
    sizes = {point["multiple"]: point for point in status["demand"]["curve"]}
    values = {
        "#saved": counters["tokens"]["loaded"],
        "#saved-more": counters["tokens"]["asked"],
        "#requests": counters["tokens"]["requests"],
        "#requests-more": counters["lookups"],
        "#evicted": status["evictions"]["room"],
        "#evicted-more": counters["shed_pages"],
        "#arena-used": status["arena"]["used_bytes"],
        "#arena-more": status["pages"],
        "#tiers [data-key=arena] td:nth-child(5)": status["arena_hits"]["lookup_pages"],
        "#tiers [data-key=arena] td:nth-child(6)": status["arena_hits"]["hit_pages"],
        "#tiers [data-key=arena] td:nth-child(8)": counters["loaded_bytes"],
        "#tiers [data-key='tier disk'] td:nth-child(4)": disk["chunks"],
        "#tiers [data-key='tier disk'] td:nth-child(5)": disk["lookup_pages"],
        "#tiers [data-key='tier disk'] td:nth-child(9)": disk["stored_bytes"],
        "#evictions [data-key=cleared] td:nth-child(2)": status["evictions"]["cleared"],
        "#misses [data-key=never_stored] td:nth-child(2)": misses["never_stored"]["ends"],
        "#misses [data-key=never_stored] td:nth-child(3)": misses["never_stored"]["pages"],
        "#ttft": counters["saved"]["ttft_s"],
        "#ttft-more": status["last_minute"]["saved"]["ttft_s"],
        "#tenants [data-key='blue in arena'] td:nth-child(2)": blue["asked_tokens"],
        "#tenants [data-key='blue in arena'] td:nth-child(3)": blue["hit_tokens"],
        "#tenants [data-key='blue in arena'] td:nth-child(6)": blue["arena"]["used_bytes"],
        "#tenants [data-key='blue in tier disk'] td:nth-child(6)": blue["tiers"][0]["used_bytes"],
        "#tenants [data-key='blue in tier disk'] td:nth-child(9)": blue["tiers"][0][
            "written_bytes"
        ],
        "#sizes [data-key='1'] td:nth-child(3)": sizes[1]["hit_ratio"],
        "#sizes [data-key='2'] td:nth-child(4)": sizes[2]["gain"],
        "#spaces tbody td:nth-child(3)": status["spaces"][0]["pages"],
        "#spaces tbody td:nth-child(5)": status["spaces"][0]["page_bytes"],
    }
    return {selector: str(value) for selector, value in values.items()}


def test_numbers_are_those_of_the_status(
    serve: Callable[..., Served],
    engine_of: Callable[[Served], Engine],
    watch: Watch,
    tmp_path: Path,
) -> None:
    one = serve("one", f"--disk={tmp_path}/disk:256M")
    two = serve("two")
    engine = engine_of(one)
    for seed in range(4):
        engine.ask(
            tokens(200 + 48 * seed, seed),
            transfer_params={"lookaside": {"tenant": "blue"}} if seed % 2 else None,
        )
    assert engine.pool.reset_prefix_cache()  # so that the next prompts are looked up
    for seed in range(6):
        engine.ask(tokens(200 + 48 * seed, seed))
    page = watch(one.address)
    page.open()
    page.live()
    # The tier is still written to: both are compared until they agree.
    until(lambda: page.shows(shown(status_of(one.endpoint))), PATIENCE_MS / 1000)
    status = status_of(one.endpoint)
    counters = status["counters"]
    assert counters["tokens"]["loaded"] > 0
    assert status["misses"]["never_stored"]["ends"] > 0
    asked, loaded = counters["tokens"]["asked"], counters["tokens"]["loaded"]
    page.text("#saved", f"{loaded:,}")
    page.text("#verdict", status_of(one.endpoint)["verdict"])
    expect(page.page.locator("#ratio-more")).to_contain_text(f"{100 * loaded / asked:.1f} % since")
    expect(page.page.locator("#sessions tbody tr")).to_have_count(len(status["sessions"]))
    expect(page.page.locator("#misses [data-key=never_stored]")).to_contain_text(
        "new prompts are computed once"
    )
    used = page.page.locator("#arena-used").text_content()
    expect(page.page.locator("#map .region-name")).to_contain_text(f": {used} of 64.0 MiB")
    expect(page.page.locator("#map rect.c0")).not_to_have_count(0)

    # It is live: what comes is seen without a reload, in the charts as well.
    engine.ask(tokens(333, 9))
    page.raw("#requests", counters["tokens"]["requests"] + 1)
    for chart in ("tokens", "hits", "bytes", "lost"):
        expect(page.page.locator(f"[data-chart={chart}] canvas")).to_have_count(1)

    # The other sidecar, by the keyboard.
    expect(page.row(one.endpoint)).to_contain_text("this one")
    expect(page.row(two.endpoint)).to_contain_text("no engine has connected")
    page.page.keyboard.press("Tab")  # Pause
    focused = page.page.locator(":focus")
    for _ in range(100):  # other tests' sidecars may be there
        page.page.keyboard.press("Tab")
        if focused.text_content() == str(two.endpoint):
            break
    page.page.keyboard.press("Enter")
    page.text("#which", str(two.endpoint))
    page.text("#verdict", "no engine has connected")
    page.raw("#requests", 0)
    expect(page.page.locator("#host tr[aria-current=true] a")).to_have_text(str(two.endpoint))
    expect(focused).to_have_text(str(two.endpoint))  # and the focus stays
    page.check()

    # A neighbour that goes is gone, and the page says so.
    two.end()
    expect(page.page.locator("#verdict")).to_contain_text(
        "Nothing can be shown of it", timeout=PATIENCE_MS
    )
    two.start()
    page.text("#verdict", "no engine has connected")
    page.check(FETCH_FAILED)


def test_why(
    serve: Callable[..., Served], engine_of: Callable[[Served], Engine], watch: Watch
) -> None:
    """A request's name, or hashes: what the page shows is what the sidecar answers, and a neighbour
    is asked as well."""
    one, two = serve("one"), serve("two")
    engine = engine_of(one)
    request, _ = engine.ask(tokens(200, 1))
    hashes = [bytes(each).hex() for each in engine.requests[request].block_hashes]
    page = watch(two.address)
    page.open()
    page.live()
    asked = page.page.get_by_role("textbox", name="Why did it miss?")
    answer = page.page.locator("#why-answer")

    def ask(text: str) -> None:
        asked.fill(text)
        asked.press("Enter")

    tenants = page.page.locator("#tenants-card")
    expect(tenants).to_be_hidden()  # nobody has named one
    ask("r")
    expect(answer).to_contain_text("no lookup of a request that begins with", timeout=PATIENCE_MS)
    page.row(one.endpoint).get_by_role("link").click()
    page.text("#which", str(one.endpoint))
    expect(answer).to_be_empty()  # it was about the other one
    lookup = why(one, {"request": request})["lookups"][0]
    ask(request)
    for text in (
        f"Request {lookup['request']}, looked up",
        f"Found 0 of {lookup['pages_asked']} pages",
        f"never_stored: {lookup['end']['what']}.",
        f"To do: {lookup['end']['fix']}.",
        f"loaded 0 and computed {lookup['computed_tokens']}.",
    ):
        expect(answer).to_contain_text(text, timeout=PATIENCE_MS)
    until(lambda: why(one, {"hashes": hashes})["prefix"]["pages"] == len(hashes))
    ask(", ".join(hashes))
    held = f"Held now: {len(hashes)} of {len(hashes)} pages, 192 tokens"
    expect(answer).to_contain_text(held, timeout=PATIENCE_MS)
    expect(answer).to_contain_text("end: the prompt ends there")
    page.check(FETCH_FAILED)  # the first had no answer


def why(sidecar: Served, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{sidecar.address}/v1/why",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_sidecar_that_goes_and_comes(serve: Callable[..., Served], watch: Watch) -> None:
    sidecar = serve("one")
    page = watch(sidecar.address)
    page.open()
    page.live()
    page.check()
    banner, process = page.page.locator("#banner"), sidecar.process
    expect(banner).to_be_hidden()
    sidecar.end()
    expect(banner).to_contain_text("has not responded since", timeout=PATIENCE_MS)
    expect(page.page.locator("#state")).to_have_text("gone")
    assert page.page.title().startswith("gone")
    sidecar.start()
    page.live()
    expect(banner).to_be_hidden()
    assert process is not None and sidecar.process is not None
    pid = str(sidecar.process.pid)
    expect(page.row(sidecar.endpoint).locator("td:nth-child(6)")).to_have_text(pid)
    assert str(process.pid) != pid
    page.check(FETCH_FAILED)
    # One that hangs is gone as well.
    sidecar.signal(signal.SIGSTOP)
    expect(page.page.locator("#state")).to_have_text("gone", timeout=PATIENCE_MS)
    sidecar.signal(signal.SIGCONT)
    page.live()
    page.check(FETCH_FAILED)


def test_token(serve: Callable[..., Served], watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    (tmp_path / "token").chmod(0o600)
    sidecar = serve("one", f"--admin-token-file={tmp_path}/token")
    page = watch(sidecar.address)
    page.open()
    form = page.page.locator("#token")
    expect(form).to_be_visible(timeout=PATIENCE_MS)
    expect(page.page.locator("#content")).to_be_hidden()
    page.page.get_by_role("textbox", name="Token").fill("wrong")
    page.page.keyboard.press("Enter")
    expect(page.page.locator("#banner")).to_contain_text("not the sidecar's")
    page.page.get_by_role("textbox", name="Token").fill("s3cret")
    page.page.get_by_role("button", name="Open").click()
    page.live()
    expect(form).to_be_hidden()
    page.text("#which", str(sidecar.endpoint))
    page.page.reload()  # the tab keeps it
    page.live()
    page.check(FETCH_FAILED)
    assert not any("s3cret" in url for url in page.asked)


def test_pause(serve: Callable[..., Served], watch: Watch) -> None:
    sidecar = serve("one")
    page = watch(sidecar.address)
    page.page.clock.install()
    page.open()
    page.page.clock.run_for(10_000)
    page.live()
    page.page.get_by_role("button", name="Pause").press("Enter")
    expect(page.page.locator("#state")).to_have_text("paused")
    page.page.wait_for_load_state("networkidle")
    before = len(page.asked)
    page.page.clock.run_for(60_000)
    assert len(page.asked) == before
    page.page.get_by_role("button", name="Go on").press("Enter")
    page.live()
    assert len(page.asked) > before
    page.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(
    serve: Callable[..., Served],
    engine_of: Callable[[Served], Engine],
    watch: Watch,
    tmp_path: Path,
    scheme: str,
) -> None:
    """At both widths nothing but tables needs scrolling sideways, and texts stand out."""
    sidecar = serve("one", f"--disk={tmp_path}/disk:256M")
    engine = engine_of(sidecar)
    request, _ = engine.ask(tokens(200), transfer_params={"lookaside": {"tenant": "t" * 64}})
    page = watch(sidecar.address, color_scheme=scheme)
    for width, height in SIZES:
        page.page.set_viewport_size({"width": width, "height": height})
        page.open()
        page.live()
        expect(page.page.locator("#tenants-card")).to_be_visible()
        page.page.get_by_role("textbox", name="Why did it miss?").fill(request)
        page.page.get_by_role("button", name="Ask").click()
        expect(page.page.locator("#why-answer")).to_contain_text("To do:", timeout=PATIENCE_MS)
        wide = page.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{wide} pixels at {width}"
        low = page.page.evaluate(CONTRASTS)
        assert not low, low
    page.check()


# Texts whose contrast with their background is below 4.5, by the formula of WCAG 2.
CONTRASTS = """() => {
  const rgb = (s) => (s.match(/[\\d.]+/g) || []).map(Number);
  const luminance = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const c = rgb(getComputedStyle(node).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const low = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walk.nextNode());) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility()) continue;
    const [a, b] = [luminance(rgb(getComputedStyle(node).color)), luminance(back(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${text.data.trim()}: ${ratio.toFixed(1)}`);
  }
  return low;
}"""
