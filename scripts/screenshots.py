"""Pictures of the dashboard and of lookaside top for docs/images: `make screenshots`.

Two vLLM servers on a sidecar each, which lend to each other; the arenas hold a third of what is
asked for, with a disk below. The dashboard is open in Chromium in both color schemes meanwhile, so
that its charts have something to show. All of it runs in a network namespace of its own, where no
other sidecar of this host is found.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from examples.stand import client, model
from examples.stand.command import ended
from examples.stand.processes import BINARY, REPO, Server, Sidecar, Stand, connector_config
from examples.stand.progress import step

OUT = REPO / "docs" / "images"
LIMIT_BYTES = 200_000
SECONDS = 150.0  # of traffic
PREFIXES = 24
PREFIX_TOKENS = 12 * 128  # whole blocks of the CPU
PROMPT_TOKENS = PREFIX_TOKENS + 200
CACHE_BLOCKS = 64  # of vLLM's own cache
COLORS = 256
PATIENCE_MS = 120_000
TERMINAL = (150, 38)
ALONE = "LOOKASIDE_SCREENSHOTS_ALONE"  # set within the namespace


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    path = model.ensure()
    with Stand(path) as stand, contextlib.ExitStack() as stack:
        name_directory(stand)
        sidecars = [stand.sidecar(i, "llama", settings=settings(stand, path, i)) for i in range(2)]
        small = stand.directory / "small-llama"
        shutil.copytree(path, small)  # whose name is on the page
        servers = [
            stand.server(
                f"llama-{i}",
                connector=connector_config(str(sidecar.endpoint)),
                arguments=[f"--num-gpu-blocks-override={CACHE_BLOCKS}"],
                max_model_len=4096,
                model=small,
            )
            for i, sidecar in enumerate(sidecars)
        ]
        with step("starting two vLLM servers"):
            for server in servers:
                server.wait_ready()
        client.warm_up(*(server.base_url for server in servers))
        browser = stack.enter_context(chromium())
        shots = [
            Shot(browser, sidecars[0], "light", 1280),
            Shot(browser, sidecars[0], "dark", 1280),
            Shot(browser, sidecars[0], "light", 400),
        ]
        with traffic(servers), step(f"traffic for {SECONDS:.0f} s"):
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                shots[0].page.wait_for_timeout(1000)  # the pages go on meanwhile
            light, dark, phone = shots
            request = missed(sidecars[0])
            for shot in shots:
                shot.ask_why(request)
            light.save("dashboard-light.png", "header", "#charts")
            dark.save("dashboard-dark.png", "header", "#charts")
            light.save("dashboard-arena.png", "#charts + section", "#charts + section + section")
            light.save("dashboard-why.png", "section:has(#misses)", "#tenants-card")
            phone.save("dashboard-phone.png", "header", "#tiles")
            top(sidecars[0], OUT / "top.svg")
    for each in sorted(OUT.iterdir()):
        size = each.stat().st_size
        if size > LIMIT_BYTES:
            raise RuntimeError(f"{each.name} has {size} bytes: at most {LIMIT_BYTES} are wanted")


def name_directory(stand: Stand) -> None:
    """Give the stand a directory whose name says something to readers of the docs."""
    named = Path(tempfile.gettempdir()) / "lookaside"
    if named.exists():
        raise RuntimeError(f"{named} exists: another run? Remove it otherwise")
    stand.directory = stand.directory.rename(named)


def settings(stand: Stand, path: Path, number: int) -> dict[str, str]:
    asked = PREFIXES * PROMPT_TOKENS * model.kv_bytes_per_token(path)
    return {
        "arena-limit": f"{max(asked // 3 >> 20, 32)}M",
        "disk": f"{stand.directory}/disk-{number}:{max(2 * asked >> 20, 256)}M",
    }


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        raise RuntimeError("Chromium is missing: scripts/setup.sh test")
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(
            executable_path=program, args=[*options, "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@contextlib.contextmanager
def traffic(servers: list[Server]) -> Iterator[None]:
    """Ask all servers: few of the prefixes often, most of them seldom, for two tenants."""
    stop = threading.Event()
    failed: list[BaseException] = []
    asked: Callable[[int], list[int]] = lambda seed: model.prompt(PREFIX_TOKENS, seed)  # noqa: E731
    prefixes = [asked(seed) for seed in range(PREFIXES)]
    weights = [1 / (rank + 1) for rank in range(PREFIXES)]

    def ask(server: Server, seed: int) -> None:
        rng = random.Random(seed)
        number = 0
        try:
            while not stop.is_set():
                number += 1
                (prefix,) = rng.choices(prefixes, weights)
                tenant = "batch" if rng.random() < 0.3 else "chat"
                client.complete(
                    server.base_url,
                    model.prompt(PROMPT_TOKENS, seed * 1_000_003 + number, prefix),
                    max_tokens=4,
                    kv_transfer_params={"lookaside": {"tenant": tenant}},
                )
        except (httpx.HTTPError, RuntimeError) as error:
            failed.append(error)

    threads = [
        threading.Thread(target=ask, args=(server, 1 + i)) for i, server in enumerate(servers)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]


def missed(sidecar: Sidecar) -> str:
    """Return the name of one of the last requests; of one that loaded something, if there is."""
    address = (sidecar.endpoint / "admin.addr").read_text().strip()
    answer = httpx.post(f"http://{address}/v1/why", json={"request": "cmpl-"}, trust_env=False)
    answer.raise_for_status()
    lookups = answer.json()["lookups"]
    some = [each for each in lookups if each["loaded_tokens"]]
    return (some or lookups)[0]["request"]


class Shot:
    """The dashboard in a window."""

    def __init__(self, browser: Browser, sidecar: Sidecar, scheme: str, width: int) -> None:
        address = (sidecar.endpoint / "admin.addr").read_text().strip()
        context = browser.new_context(
            color_scheme="dark" if scheme == "dark" else "light",
            viewport={"width": width, "height": 900},
            device_scale_factor=1.5,
        )
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.goto(f"http://{address}/")
        expect(self.page.locator("#state")).to_have_attribute("data-state", "live")

    def ask_why(self, request: str) -> None:
        self.page.get_by_role("textbox", name="Why did it miss?").fill(request)
        self.page.get_by_role("button", name="Ask").click()
        expect(self.page.locator("#why-answer")).to_contain_text(request, timeout=PATIENCE_MS)
        self.page.locator("#why-text").blur()

    def save(self, name: str, first: str, last: str) -> None:
        """Save the page from one element to another, in a palette of its own."""
        margin = 12
        width = self.page.viewport_size["width"]  # type: ignore[index]
        height = self.page.evaluate("document.documentElement.scrollHeight")
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
        )
        boxes = [self.page.locator(each).first.bounding_box() for each in (first, last)]
        top, bottom = boxes
        assert top and bottom
        y = max(0.0, top["y"] - margin)
        clip = {
            "x": 0,
            "y": y,
            "width": width,
            "height": bottom["y"] + bottom["height"] - y,
        }
        data = self.page.screenshot(clip=clip)  # type: ignore[arg-type]
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        small = picture.quantize(
            COLORS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE
        )
        small.save(OUT / name, optimize=True)


def top(sidecar: Sidecar, out: Path) -> None:
    """Save what lookaside top shows in a terminal as an SVG that loads nothing from elsewhere."""
    columns, lines = TERMINAL
    socket = sidecar.endpoint.parent / "tmux"

    def tmux(*words: str) -> str:
        return subprocess.run(
            ["tmux", "-S", str(socket), *words], check=True, capture_output=True, text=True
        ).stdout

    command = f"{BINARY} top --runtime-dir={sidecar.endpoint}"
    tmux("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(lines), command)
    try:
        screen = ""
        end = time.monotonic() + PATIENCE_MS / 1000
        while "SESSION" not in screen:
            if time.monotonic() > end:
                raise RuntimeError(f"lookaside top shows no sessions:\n{screen}")
            time.sleep(0.2)
            screen = tmux("capture-pane", "-e", "-p")
    finally:
        tmux("kill-server")
    console = Console(
        record=True, width=columns, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(Text.from_ansi(screen.rstrip("\n")), soft_wrap=False)
    form = re.sub(r"@font-face \{\{.*?\n    \}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    assert "@font-face" not in form
    out.write_text(
        console.export_svg(title="lookaside top", theme=MONOKAI, code_format=form, unique_id="top")
    )


if __name__ == "__main__":
    if ALONE not in os.environ:
        root = [] if os.geteuid() == 0 else ["--map-root-user"]
        os.environ[ALONE] = "1"
        again = f"ip link set lo up && exec {sys.executable} -m scripts.screenshots"
        os.execvp("unshare", ["unshare", "--net", *root, "sh", "-c", again])
    with ended("screenshots"):
        main()
