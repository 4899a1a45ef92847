"""The HiCache backend against real sidecars, through SGLang's interface and its host pools.

sglang_interface.py says which interface that is: the real one or the recorded one.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import random
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang_interface
import torch
from lookaside.config import ConfigError
from peer import until
from sglang_interface import LAYOUTS, PAGE, PAGES, config, parameters, pool
from test_client import Sidecar

REAL = sglang_interface.install()

from lookaside.hicache import (  # noqa: E402  # after its interface is there
    LookasideStorage,
    page_layout,
    space_fields,
    weights_of,
)

PATIENCE_S = 60.0


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    it = Sidecar(tmp_path / "rank-0")
    try:
        yield it
    finally:
        it.process.send_signal(signal.SIGCONT)
        it.stop()


@pytest.fixture
def backends() -> Iterator[Any]:
    """Makes backends as SGLang does, and closes them."""
    made: list[LookasideStorage] = []

    def make(sidecar: Sidecar | Path, host: Any, timeout_s: float = PATIENCE_S, **kw: Any) -> Any:
        directory = sidecar.directory if isinstance(sidecar, Sidecar) else sidecar
        extra = {
            "backend_name": "lookaside",
            "module_path": "lookaside.hicache",
            "class_name": "LookasideStorage",
            "interface_v1": 1,
            "endpoint": str(directory),
            "timeout_s": timeout_s,
            **kw.pop("extra", {}),
        }
        settings = config(extra_config=extra, **kw)
        if REAL:
            from sglang.srt.mem_cache.storage.backend_factory import (  # type: ignore[import-not-found]
                StorageBackendFactory,
            )

            backend = StorageBackendFactory.create_backend("dynamic", settings, host)
        else:
            backend = LookasideStorage(settings, {})
        made.append(backend)
        backend.register_mem_pool_host(host)
        return backend

    yield make
    for each in made:
        each.close()


def page_bytes(host: Any, page: int) -> bytes:
    """The bytes of a page, by SGLang's own addresses."""
    pointers, sizes = host.get_page_buffer_meta(torch.arange(page * PAGE, (page + 1) * PAGE))
    return b"".join(ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True))


def fill(host: Any, page: int, seed: int) -> bytes:
    """Write a page; return what it has now."""
    pointers, sizes = host.get_page_buffer_meta(torch.arange(page * PAGE, (page + 1) * PAGE))
    for at, size in zip(pointers, sizes, strict=True):
        ctypes.memmove(at, random.Random(f"{seed} {at}").randbytes(size), size)
    return page_bytes(host, page)


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def keys(*numbers: int) -> list[str]:
    return [f"{number:064x}" for number in numbers]


def test_the_recorded_interface_is_sglangs() -> None:
    real: Any = sys.modules[sglang_interface.MODULE]
    for method in sglang_interface.METHODS:
        recorded = parameters(sglang_interface.Storage, method)
        assert parameters(real.HiCacheStorage, method) == recorded, method
        assert parameters(LookasideStorage, method) == recorded, method
    names = list(sglang_interface.Config.__dataclass_fields__)
    assert list(real.HiCacheStorageConfig.__dataclass_fields__) == names
    assert issubclass(LookasideStorage, real.HiCacheStorage)


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_go_there_and_back(sidecar: Sidecar, backends: Any, mla: bool, layout: str) -> None:
    host, other = pool(REAL, mla, layout), pool(REAL, mla, layout)
    backend = backends(sidecar, host, is_mla_model=mla)
    content = [fill(host, page, 1) for page in (3, 7, 8, 0)]
    assert backend.batch_exists(keys(1, 2, 3, 4)) == 0
    assert backend.batch_set_v1(keys(1, 2, 3, 4), indices(3, 7, 8, 0)) == [True] * 4
    assert backend.batch_exists(keys(1, 2, 3, 4)) == 4
    assert backend.batch_set_v1(keys(1, 2, 3, 4), indices(9, 9, 9, 9)) == [True] * 4, "held"
    reader = backends(sidecar, other, is_mla_model=mla)
    untouched = page_bytes(other, 1)
    assert reader.batch_get_v1(keys(4, 5, 2, 1), indices(10, 1, 2, 3)) == [True, False, True, True]
    assert page_bytes(other, 10) == content[3]
    assert page_bytes(other, 2) == content[1] and page_bytes(other, 3) == content[0]
    assert page_bytes(other, 1) == untouched
    assert reader.clear() and reader.batch_exists(keys(1)) == 0


def test_exists_counts_pages_from_the_start(sidecar: Sidecar, backends: Any) -> None:
    host = pool(REAL, False, "layer_first")
    backend = backends(sidecar, host)
    for number in (*range(0, 20), *range(21, 30)):
        assert backend.batch_set_v1(keys(number), indices(number % PAGES)) == [True]
    assert backend.batch_exists(keys(*range(30))) == 20
    assert backend.batch_exists(keys(*range(21, 30)), None) == 9
    assert backend.batch_exists(keys(20, 21)) == 0 and backend.batch_exists([]) == 0
    assert backend.exists(keys(3)[0]) and not backend.exists(keys(20)[0])


def test_the_older_calls_move_tensors(sidecar: Sidecar, backends: Any) -> None:
    host = pool(REAL, False, "page_first")
    backend = backends(sidecar, host)
    size = len(page_bytes(host, 0))
    values = [torch.arange(size // 2, dtype=torch.int16) * (i + 1) for i in range(3)]
    assert backend.batch_set(keys(1, 2, 3), values)
    assert backend.set(keys(1)[0], values[2]), "held already"
    assert not backend.set(keys(9)[0])
    targets = [torch.zeros(size // 2, dtype=torch.int16) for _ in range(4)]
    got = backend.batch_get(keys(1, 2, 4, 3), targets)
    assert got[2] is None and got[0] is targets[0]
    for index, value in ((0, values[0]), (1, values[1]), (3, values[2])):
        assert torch.equal(got[index], value)
    assert torch.equal(backend.get(keys(2)[0]).view(torch.int16), values[1])
    assert backend.get(keys(2)[0], torch.zeros(3)) is None, "of another size"
    # What one kind of call stores the other finds.
    assert backend.batch_get_v1(keys(2), indices(5)) == [True]
    assert page_bytes(host, 5) == values[1].numpy().tobytes()


def test_a_rank_finds_its_own_pages_alone(sidecar: Sidecar, backends: Any) -> None:
    first, second = pool(REAL, False, "layer_first"), pool(REAL, False, "layer_first")
    one = backends(sidecar, first, tp_rank=0, tp_size=2)
    two = backends(sidecar, second, tp_rank=1, tp_size=2)
    content = fill(first, 0, 1), fill(second, 0, 2)
    assert one.batch_set_v1(keys(1), indices(0)) == [True]
    assert two.batch_exists(keys(1)) == 0
    assert two.batch_set_v1(keys(1), indices(0)) == [True]
    assert one.batch_get_v1(keys(1), indices(1)) == two.batch_get_v1(keys(1), indices(1)) == [True]
    assert (page_bytes(first, 1), page_bytes(second, 1)) == content


def test_ranks_with_the_same_pages_share_them(sidecar: Sidecar, backends: Any) -> None:
    first, second = pool(REAL, True, "layer_first"), pool(REAL, True, "layer_first")
    writer = backends(sidecar, first, is_mla_model=True, tp_rank=0, tp_size=2)
    reader = backends(sidecar, second, is_mla_model=True, tp_rank=1, tp_size=2)
    content = fill(first, 0, 1)
    assert writer.batch_set_v1(keys(1), indices(0)) == [True]
    assert reader.batch_get_v1(keys(1), indices(4)) == [True] and page_bytes(second, 4) == content


def test_what_must_not_meet_has_spaces_of_its_own(tmp_path: Path) -> None:
    host = pool(REAL, False, "layer_first")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    before = weights_of(str(model))
    (model / "config.json").write_text("{ }")
    assert weights_of(str(model)) != before and weights_of("no such/model") == ""
    plain = space_fields(config(), host, "", 100)
    other = pool(REAL, False, "page_first")
    changed = [
        space_fields(config(model_name="another"), host, "", 100),
        space_fields(config(tp_rank=1, tp_size=2), host, "", 100),
        space_fields(config(pp_rank=1, pp_size=2), host, "", 100),
        space_fields(config(attn_cp_rank=1, attn_cp_size=2), host, "", 100),
        space_fields(config(is_mla_model=True), host, "", 100),
        space_fields(config(), other, "", 100),
        space_fields(config(), host, "mine", 100),
        space_fields(config(), host, "", 101),
    ]
    assert len({tuple(each.items()) for each in [plain, *changed]}) == len(changed) + 1
    assert space_fields(config(dp_rank=1), host, "", 100) == plain, "replicas of the same pages"


def test_settings_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    for extra, named in [
        ({"endpont": "/x"}, "endpont"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"copy_threads": True}, "copy_threads"),
    ]:
        with pytest.raises(ConfigError, match=named):
            LookasideStorage(config(extra_config=extra), {})
    with pytest.raises(ConfigError, match="tp_lcm_size"):
        LookasideStorage(config(should_split_heads=True), {})
    with pytest.raises(ConfigError, match="does not tell"):
        page_layout(object.__new__(type("Pool", (), {"page_size": 1, "size": 4, "layout": "x"})))
    uneven = pool(False, False, "layer_first")
    meta = uneven.get_page_buffer_meta
    uneven.get_page_buffer_meta = lambda at: (
        [p + 64 * int(at[0] > 3 * PAGE) for p in meta(at)[0]],
        meta(at)[1],
    )
    with pytest.raises(ConfigError, match="even distances"):
        page_layout(uneven)


def test_indices_that_are_no_pages_are_refused(sidecar: Sidecar, backends: Any) -> None:
    backend = backends(sidecar, pool(REAL, False, "layer_first"))
    with pytest.raises(ValueError, match="host indices"):
        backend.batch_set_v1(keys(1, 2), indices(0))
    with pytest.raises(ValueError, match="multiples"):
        backend.batch_set_v1(keys(1), indices(0) + 1)
    assert backend.batch_set_v1(keys(1), indices(PAGES)) == [False], "beyond the pool"
    assert backend.batch_exists(keys(1)) == 0, "nothing of it is visible"


def test_without_a_sidecar_everything_is_a_miss(tmp_path: Path, backends: Any) -> None:
    host = pool(REAL, False, "layer_first")
    backend = backends(tmp_path / "rank-0", host, timeout_s=0.2)
    assert backend.batch_exists(keys(1, 2)) == 0
    assert backend.batch_set_v1(keys(1, 2), indices(0, 1)) == [False, False]
    assert backend.batch_get_v1(keys(1, 2), indices(0, 1)) == [False, False]
    assert backend.get(keys(1)[0]) is None and not backend.clear()
    assert not backend.batch_set(keys(1), [torch.zeros(4)])
    sidecar = Sidecar(tmp_path / "rank-0")
    try:
        until(lambda: backend.batch_set_v1(keys(1), indices(0)) == [True], PATIENCE_S)
    finally:
        sidecar.stop()


def test_pages_outlive_the_sidecar_that_is_killed(sidecar: Sidecar, backends: Any) -> None:
    host = pool(REAL, False, "page_first_direct")
    backend = backends(sidecar, host)
    content = fill(host, 0, 1)
    assert backend.batch_set_v1(keys(1), indices(0)) == [True]
    assert backend.batch_get_v1(keys(1), indices(5)) == [True], "the sidecar has taken it in"
    sidecar.stop(signal.SIGKILL)
    sidecar.start()
    until(lambda: backend.batch_get_v1(keys(1), indices(6)) == [True], PATIENCE_S)
    assert page_bytes(host, 6) == content


def test_the_documented_command_is_sglangs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    pattern = r"--hicache-storage-backend-extra-config '(.*?)'"
    given = json.loads(re.findall(pattern, text, re.DOTALL)[0])
    module = importlib.import_module(given["module_path"])
    assert getattr(module, given["class_name"]) is LookasideStorage
    assert given["interface_v1"] and module._settings(given)["endpoint"]
    table = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| (`[^|]*) \|", text))))
    assert set(module._SETTINGS) <= table


def test_random_history(sidecar: Sidecar, backends: Any) -> None:
    """Two engines and more pages than the arena has room for: a page is a miss, or its bytes."""
    chance = random.Random(1)
    hosts = [pool(REAL, False, layout) for layout in ("layer_first", "layer_first")]
    pair = [backends(sidecar, host) for host in hosts]
    content: dict[int, bytes] = {}
    hits = 0
    for _ in range(150):
        at = chance.randrange(2)
        host, backend = hosts[at], pair[at]
        numbers = [chance.randrange(60) for _ in range(chance.randint(1, 8))]
        numbers = list(dict.fromkeys(numbers))
        pages = chance.sample(range(PAGES), len(numbers))
        if chance.random() < 0.5:
            for number, page in zip(numbers, pages, strict=True):
                if number in content:
                    pointers, sizes = host.get_page_buffer_meta(indices(page))
                    begin = 0
                    for pointer, size in zip(pointers, sizes, strict=True):
                        ctypes.memmove(pointer, content[number][begin : begin + size], size)
                        begin += size
                else:
                    content[number] = fill(host, page, number)
            assert all(backend.batch_set_v1(keys(*numbers), indices(*pages)))
        else:
            found = backend.batch_get_v1(keys(*numbers), indices(*pages))
            for number, page, there in zip(numbers, pages, found, strict=True):
                assert not there or page_bytes(host, page) == content[number]
                hits += there
    assert hits > 50
