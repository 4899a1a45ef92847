"""Pages that take less room in the arena than in vLLM's KV cache: the setting ``compress``.

The copies encode a page on its way out and decode it on its way back (_codec.h). All that lies
behind them, the sidecar and its tiers, sees smaller pages. Encoded pages have one size whatever is
in them, so that slots stay slots. The space has the field ``encoding``: bytes of different
encodings are of different spaces, and never meet.

Copies by a GPU's driver move pages as they are, so only a KV cache in host memory can be encoded.

This module imports neither torch nor vLLM: it uses tensors as they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lookaside import _native
from lookaside.layout import Encoding, PageLayout

CODECS = {"fp8": _native.FP8, "int8": _native.INT8, "lossless": _native.LOSSLESS}
"""What ``compress`` may be, beside "none"."""

_ELEMENTS = {
    "bfloat16": _native.BFLOAT16,
    "float16": _native.FLOAT16,
    "float32": _native.FLOAT32,
}
# Raise it when a codec's bytes change: what was stored before is then of another space.
_VERSION = 1


def encode(
    layout: PageLayout, compress: str, kv_caches: Mapping[str, Any]
) -> tuple[PageLayout, str | None]:
    """Return the layout with its pages encoded as the setting says.

    Where they cannot be, return the layout as it is and the reason.
    """
    if compress == "none":
        return layout, None
    devices = {str(tensor.device).partition(":")[0] for tensor in kv_caches.values()}
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in kv_caches.values()}
    fault = _fault(layout, compress, devices, dtypes)
    if fault is not None:
        return layout, fault
    (dtype,) = dtypes
    encoding = Encoding(CODECS[compress], _ELEMENTS[dtype])
    blocks = tuple(
        _native.encoded_bytes(encoding.codec, encoding.element, size) for size in layout.block_bytes
    )
    described = {**layout.description, "encoding": f"{compress} of {dtype}, version {_VERSION}"}
    return (
        replace(
            layout,
            page_bytes=sum(blocks),
            encoding=encoding,
            encoded_bytes=blocks,
            description=described,
        ),
        None,
    )


def _fault(
    layout: PageLayout, compress: str, devices: Iterable[str], dtypes: Iterable[str]
) -> str | None:
    """Return why pages cannot be encoded, and what to do instead; None if they can."""
    for device in devices:
        if device != "cpu":
            return (
                f"the KV cache is on {device}, and only copies of a KV cache in host memory can "
                "encode; there, --kv-cache-dtype fp8 of vLLM halves pages"
            )
    if layout.states:
        return "some layers keep a state, which loses its meaning when it is rounded"
    for dtype in dtypes:
        if dtype not in _ELEMENTS:
            return f"the KV cache has elements of {dtype}, which are small already"
    if len(set(dtypes)) != 1:
        return f"layers of the KV cache have different elements: {', '.join(sorted(dtypes))}"
    if compress == "lossless" and "float16" in dtypes:
        return "lossless saves next to nothing of float16; use fp8 or int8, or --dtype bfloat16"
    return None
