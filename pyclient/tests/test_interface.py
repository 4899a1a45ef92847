"""What the connector needs of vLLM: the tables against the package's code, and what is missing
against what becomes of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lookaside
import pytest
import vllm
from lookaside import interface
from lookaside.connector import LookasideConnector
from lookaside.interface import NEEDS, Call, Has
from lookaside.scheduler.in_step import recovers
from scheduling import BLOCK, Stand, make_config, sliding_window, tokens
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

PACKAGE = Path(lookaside.__file__).parent

# What holds an object of vLLM, by the name of the variable or attribute. Where a parameter has an
# annotation, that counts instead.
HOLDERS = {
    "block": "KVCacheBlock",
    "block_state": "KVConnectorBlockState",
    "cache_config": "CacheConfig",
    "cached": "KVCacheBlock",
    "device_config": "DeviceConfig",
    "feature": "MultiModalFeatureSpec",
    "group": "KVCacheGroupSpec",
    "kv_cache_config": "KVCacheConfig",
    "kv_connector_block_state": "KVConnectorBlockState",
    "kv_transfer_config": "KVTransferConfig",
    "_kv_transfer_config": "KVTransferConfig",
    "lora": "LoRARequest",
    "lora_request": "LoRARequest",
    "model_config": "ModelConfig",
    "parallel_config": "ParallelConfig",
    "pool": "BlockPool",
    "request": "Request",
    "sampling_params": "SamplingParams",
    "spec": "Spec",
    "speculative_config": "SpeculativeConfig",
    "vllm_config": "VllmConfig",
}
TYPES = {
    "BlockPool",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVConnectorOutput",
    "LoRARequest",
    "Request",
    "SchedulerOutput",
    "VllmConfig",
}
# Two names mean different things in different modules.
ELSEWHERE = {
    "block": {"scheduler/saves.py"},
    "spec": {"description.py", "kvgroups.py", "layout.py", "space.py"},
}
# Not the connector's: they find out for themselves what their engines have.
OTHERS = {"hicache.py", "tierspace.py", "vllm_tier.py", "tiers"}
# Imported by a method that only a vLLM calls which has it.
FOR_CALLERS = {
    "vllm.v1.metrics.cache_hit_source:CacheHitSource",
    # plugin.py does without it: kv_connector_module_path names the connector as well.
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory",
}


class Uses(ast.NodeVisitor):
    """Collects what one module uses of vLLM."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.attributes: dict[str, set[str]] = defaultdict(set)
        self.imports: set[str] = set()
        self.calls: set[tuple[str, int]] = set()
        self._scopes: list[dict[str, str | None]] = [{}]
        self._for_types = False

    def visit_If(self, node: ast.If) -> None:
        before = self._for_types
        self._for_types = before or ast.unparse(node.test) == "TYPE_CHECKING"
        self.generic_visit(node)
        self._for_types = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        scope: dict[str, str | None] = {}
        for each in [*node.args.args, *node.args.kwonlyargs]:
            text = ast.unparse(each.annotation).split(" |")[0] if each.annotation else "Any"
            if text != "Any":
                scope[each.arg] = text if text in TYPES else None
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        # Imports at the module's head are for classes to inherit from: without these no connector
        # can be made, and the import's error says so.
        if len(self._scopes) > 1 and not self._for_types and (node.module or "").startswith("vllm"):
            for each in node.names:
                self.imports.add(f"{node.module}:{each.name}")
                self._scopes[-1][each.asname or each.name] = f"{node.module}:{each.name}"

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        target, value = node.targets[0], node.value
        pairs = (
            zip(target.elts, value.elts, strict=True)
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            else [(target, value)]
        )
        for name, each in pairs:
            if isinstance(name, ast.Name) and (kind := self._kind(each)):
                self._scopes[-1][name.id] = kind

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if kind := self._kind(node.value):
            self.attributes[kind].add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and (kind := self._kind(node.func)) and ":" in kind:
            self.calls.add((kind, len(node.args)))
        if isinstance(node.func, ast.Attribute) and (kind := self._kind(node.func.value)):
            self.calls.add((f"{kind}.{node.func.attr}", len(node.args)))
        self.generic_visit(node)

    def _kind(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Subscript):
            return self._kind(node.value) if ast.unparse(node.value) == "cached" else None
        name = getattr(node, "attr", None)
        if isinstance(node, ast.Name):
            for scope in reversed(self._scopes):
                if node.id in scope:
                    return scope[node.id]
            name = node.id
        if name in ELSEWHERE and self.module not in ELSEWHERE[name]:
            return None
        return HOLDERS.get(name or "")


@pytest.fixture(scope="module")
def uses() -> list[Uses]:
    found = []
    for path in PACKAGE.rglob("*.py"):
        if {path.name, path.parent.name} & OTHERS:
            continue
        found.append(Uses(str(path.relative_to(PACKAGE))))
        found[-1].visit(ast.parse(path.read_text()))
    return found


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was found out is found out anew by each test, and by those after."""
    for each in (interface.idle_reason, interface.lacks):
        each.cache_clear()
    yield
    for each in (interface.idle_reason, interface.lacks):
        each.cache_clear()


def declared(kind: str, needs: Iterable[Call | Has] = NEEDS) -> set[str]:
    """The attributes that the tables have of a class; of all specs together."""
    found: set[str] = set()
    for need in needs:
        name = need.path.partition(":")[2]
        owner, _, method = name.partition(".")
        if kind in (owner, "Spec" if owner.endswith(("AttentionSpec", "WindowSpec")) else ""):
            found.update(need.names if isinstance(need, Has) else filter(None, [method]))
        if kind == "Spec" and owner == "MambaSpec" and isinstance(need, Has):
            found.update(need.names)
    return found


def test_the_tables_have_the_attributes_that_are_used(uses):
    used: dict[str, set[str]] = defaultdict(set)
    for module in uses:
        for kind, names in module.attributes.items():
            if ":" not in kind:
                used[kind] |= names
    for kind, names in used.items():
        assert names - declared(kind) == set(), f"add to lookaside/interface.py what {kind} is for"
        # What a feature needs may be used where it is, and done without where it is not.
        needed = declared(kind, [need for need in NEEDS if not need.feature])
        assert needed - names == set(), f"lookaside/interface.py: unused of {kind}"
    assert len(used) > 15


def test_the_tables_have_what_is_imported(uses):
    used = set().union(*(module.imports for module in uses)) - FOR_CALLERS
    modules = {path.replace(":", ".") for path in used} & {
        need.path.partition(":")[0] for need in NEEDS
    }
    known = {need.path for need in NEEDS} | {
        f"{need.path}:{name}" for need in NEEDS if isinstance(need, Has) for name in need.names
    }
    methods = {need.path.rpartition(".")[0] for need in NEEDS if isinstance(need, Call)}
    left = {path for path in used if path.replace(":", ".") not in modules} - known - methods
    assert left == set(), "add these to lookaside/interface.py"


def test_the_tables_have_how_functions_are_called(uses):
    used = set().union(*(module.calls for module in uses))
    for need in NEEDS:
        if not isinstance(need, Call):
            continue
        owner, _, method = need.path.partition(":")[2].partition(".")
        counts = {arguments for path, arguments in used if path in (need.path, f"{owner}.{method}")}
        # Some are reached as attributes of their module, some are only wrapped or overridden.
        assert counts <= {need.arguments}, need.path


def test_this_vllm_has_all_that_is_needed():
    assert interface.idle_reason(LookasideConnector) is None
    release = tuple(map(int, vllm.__version__.split(".")[:2]))
    if release >= (0, 30):
        assert not list(interface.notes())


def test_importing_it_imports_nothing_of_vllm():
    code = "import sys, lookaside.interface; sys.exit(any(m == 'vllm' for m in sys.modules))"
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


def remove_method(patch: pytest.MonkeyPatch) -> str:
    patch.delattr(BlockPool, "touch")
    return "BlockPool.touch"


def remove_attribute(patch: pytest.MonkeyPatch) -> str:
    def __init__(self: Any, request_id: str) -> None:
        self.request_id = request_id

    patch.setattr(Request, "__init__", __init__)
    return "Request.block_hashes"


def add_argument(patch: pytest.MonkeyPatch) -> str:
    def resolve_kv_cache_block_sizes(kv_cache_config: Any, vllm_config: Any, rank: int) -> None: ...

    patch.setattr(kv_cache_utils, "resolve_kv_cache_block_sizes", resolve_kv_cache_block_sizes)
    return "resolve_kv_cache_block_sizes with 2 arguments"


def call_with_more(patch: pytest.MonkeyPatch) -> str:
    def update_state_after_alloc(
        self: Any, request: Any, blocks: Any, external: int, why: str
    ) -> None: ...

    patch.setattr(KVConnectorBase_V1, "update_state_after_alloc", update_state_after_alloc)
    return "update_state_after_alloc has other parameters: self, request, blocks, external, why"


def call_no_more(patch: pytest.MonkeyPatch) -> str:
    patch.delattr(KVConnectorBase_V1, "on_new_request")
    return "KVConnectorBase_V1.on_new_request"


def ask_for_more(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(LookasideConnector, "unknown_methods", frozenset({"hand_over"}))
    return "KVConnectorBase_V1.hand_over is new"


CHANGES = [
    remove_method,
    add_argument,
    call_with_more,
    ask_for_more,
    call_no_more,
    remove_attribute,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_missing_is_named(monkeypatch, change):
    named = change(monkeypatch)
    reason = interface.idle_reason(LookasideConnector)
    assert reason is not None and named in reason and vllm.__version__ in reason


@pytest.mark.parametrize("change", [add_argument, call_with_more, ask_for_more])
def test_the_engine_serves_without_the_connector(monkeypatch, model, change):
    """Whatever is missing: it starts and computes."""
    with monkeypatch.context() as patch:
        named = change(patch)
        assert named in str(interface.idle_reason(LookasideConnector))
    stand = Stand(make_config(model))  # vLLM is whole again, and the finding stays
    assert stand.connector._scheduler is None
    stand.add(tokens(5 * BLOCK))
    stand.run()
    assert not stand.scheduler.requests


def test_a_method_that_newer_vllms_ask_for_does_not_keep_it_from_being_made():
    assert not LookasideConnector.__abstractmethods__
    assert LookasideConnector.unknown_methods == frozenset()


def test_a_feature_is_off_when_what_it_needs_is_missing(monkeypatch, model):
    config = make_config(model)
    with monkeypatch.context() as patch:
        patch.delattr(BlockPool, "evict_blocks")
        patch.delattr(kv_cache_utils, "hash_block_tokens")
        notes = list(interface.notes())
    assert any("BlockPool.evict_blocks" in note and "within the step" in note for note in notes)
    assert any("hash_block_tokens" in note and "last page" in note for note in notes)
    assert not recovers(config)
    interface.lacks.cache_clear()
    assert recovers(config)
    assert interface.idle_reason(LookasideConnector) is None


def test_a_newer_vllm_is_noted(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.1rc2")
    (note, *_) = interface.notes()
    assert "vLLM 0.99.1rc2 is newer" in note and interface.TESTED[1] in note
    for version in (f"{interface.TESTED[1]}.4", "0.1.dev7+g1234", "unknown"):
        monkeypatch.setattr(vllm, "__version__", version)
        assert not any("newer" in note for note in interface.notes())


def test_models_of_several_groups_want_a_vllm_that_starts_over(monkeypatch, model):
    from lookaside import space
    from scheduling import make_kv_config
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    windows = make_kv_config(4, [sliding_window(64)])
    monkeypatch.delattr(base, "KVConnectorTransferResults", raising=False)
    reason = space.idle_reason(make_config(model), windows)
    assert "KVConnectorTransferResults" in str(reason)
    assert space.idle_reason(make_config(model), make_kv_config(4)) is None
