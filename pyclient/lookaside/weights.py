"""Tells whether two models have the same weights, by a digest of what is in them.

``digest_of`` runs in vLLM's workers, as a collective RPC. It reads every parameter and buffer
where it lies: on a GPU at the speed of its memory, on a CPU by SHA-256 on several threads. Equal
digests mean equal weights; what is not equal bit by bit is different.

Some of vLLM's kernels keep a weight in a form of their own and leave an empty parameter. On a CPU
these are linear layers, whose weight is read by multiplying with the unit matrix: that is exact.
Where a weight cannot be read, there is no digest.

This module imports neither torch nor vLLM until a function needs them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MAX_THREADS = 8
# Bytes that are hashed at a time on a device, which needs a few times that to compute with.
_PIECE_BYTES = 8 << 20
# Rows of the unit matrix that are multiplied at a time.
_ROWS = 256
# Matrices that vLLM derives from a parameter and computes with instead.
_DERIVED = ("W_UK_T", "W_UV")
# Odd numbers of 64 bits, as signed ones: a word's place is multiplied by the first, and mixed words
# by the others. Each half of a digest on a device has its own.
_MIX = (
    (-7046029254386353131, -4658895280553007687, -7723592293110705685),
    (-4417276706812531889, -8796714831421723037, -5808590958014384161),
)


class Unreadable(Exception):
    """A model has weights that cannot be read."""


def digest_of(worker: Any) -> str | None:
    """Return a digest of the weights that a vLLM worker computes with, those of a draft model too.

    None if they cannot be read. Nothing may change them meanwhile.
    """
    import torch

    models = [("", worker.get_model())]
    draft = _draft_of(worker)
    if draft is not None:
        models.append(("draft.", draft))
    try:
        with torch.no_grad():
            return digest(
                (prefix + name, tensor)
                for prefix, model in models
                for name, tensor in weights_of(model)
            )
    except Unreadable:
        return None


def _draft_of(worker: Any) -> Any:
    get = getattr(worker, "get_draft_model", None)
    if get is not None:
        return get()
    return getattr(getattr(worker.model_runner, "drafter", None), "model", None)


def weights_of(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return every tensor that a model computes with, with its name. Raises Unreadable."""
    for at, module in model.named_modules():
        for name, tensor in module.named_parameters(at, recurse=False):
            yield from _parts(name, tensor)
            if tensor.numel() == 0 and not tensor.is_meta:
                yield f"{name} packed", _unpacked(name, module)
        for name, tensor in module.named_buffers(at, recurse=False):
            yield from _parts(name, tensor)
        for name in _DERIVED:
            derived: Any = getattr(module, name, None)
            if hasattr(derived, "numel"):
                yield f"{at}.{name}", derived


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors that have the bytes of one, which may be made of several."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    several = getattr(tensor, "partitions", None)  # of a parameter that layers share
    if isinstance(several, Mapping):
        for index, part in several.items():
            yield from _parts(f"{name}.{index}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _parts(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        yield name, tensor


def _unpacked(name: str, module: Any) -> torch.Tensor:
    """Return the weight of a linear layer that a CPU kernel has packed, transposed."""
    import torch

    linear = getattr(module, "cpu_linear", None)
    size = getattr(module, "input_size_per_partition", None)
    if linear is None or not size or not name.endswith("weight"):
        raise Unreadable(name)
    empty = module.weight
    unit = torch.eye(size, dtype=empty.dtype, device=empty.device)
    rows = [linear(unit[at : at + _ROWS], empty, None) for at in range(0, size, _ROWS)]
    return torch.cat(rows)


def digest(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    """Return a digest of named tensors, in any order. Raises Unreadable."""
    import torch

    lines: list[str] = []
    on_device: list[tuple[str, list[torch.Tensor]]] = []
    count = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(count, thread_name_prefix="lookaside-weights") as threads:
        hashed = []
        for name, tensor in tensors:
            # In the order in which the bytes lie: a matrix that is transposed need not be copied.
            order = sorted(range(tensor.ndim), key=lambda axis: -tensor.stride(axis))
            lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {order}")
            if tensor.is_meta or not tensor.numel():
                continue
            try:
                flat = tensor.detach().permute(order).contiguous().reshape(-1).view(torch.uint8)
            except RuntimeError as error:
                raise Unreadable(f"{name}: {error}") from error
            if flat.device.type == "cpu":
                hashed.append((name, threads.submit(hashlib.sha256, flat.numpy().data)))
            else:
                on_device.append((name, _device_sums(flat)))
        lines += [f"{name} {each.result().hexdigest()}" for name, each in hashed]
    for name, sums in on_device:
        # One wait for the device: all of its work is queued by now.
        words = ",".join(f"{int(word) & 0xFFFFFFFFFFFFFFFF:x}" for word in torch.stack(sums).cpu())
        lines.append(f"{name} {words}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _device_sums(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return 128 bits that tell the bytes of a tensor from others, as two numbers on its device.

    Every word of 8 bytes is mixed with its place, and the results are added. That is no
    cryptographic hash, and need not be: nobody chooses weights so that they collide.
    """
    import torch

    sums = [torch.zeros((), dtype=torch.int64, device=flat.device) for _ in _MIX]
    for start in range(0, flat.numel(), _PIECE_BYTES):
        piece = flat[start : start + _PIECE_BYTES]
        if piece.numel() % 8 or piece.storage_offset() % 8:
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 8))
        words = piece.view(torch.int64)
        place = torch.arange(words.numel(), dtype=torch.int64, device=flat.device)
        place += start // 8 + 1
        for at, (spread, first, second) in enumerate(_MIX):
            mixed = words ^ (place * spread)
            mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * first
            mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * second
            sums[at] += (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)).sum()
    return sums
