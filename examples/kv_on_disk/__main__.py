"""A program written for LightMem: prefixes of pages go to disk, and come back in another process.

    python -m examples.kv_on_disk DIRECTORY         # writes, and ends
    python -m examples.kv_on_disk DIRECTORY --read  # another process: reads, and checks each byte

It imports ``light_mem``: that of LightMem, or the one of packaging/light_mem, which is Lookaside's.
With LightMem the second process finds nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import xxhash
from light_mem import PyLocalCacheService, PyState  # pyright: ignore[reportMissingImports]

PAGES = 1024
PAGE_BYTES = 16 << 10


def cumulative(tokens: list[int]) -> list[int]:
    """The hash of each page: of all tokens up to it. A page has one token here."""
    state = xxhash.xxh3_128()
    hashes = []
    for token in tokens:
        state.update(token.to_bytes(8, "little"))
        hashes.append(state.intdigest())
    return hashes


def content(hashes: list[int]) -> torch.Tensor:
    """What a model would have computed for these pages."""
    pages = []
    for each in hashes:
        generator = torch.Generator().manual_seed(each & 0x7FFFFFFFFFFFFFFF)
        pages.append(torch.randint(0, 256, (PAGE_BYTES,), dtype=torch.uint8, generator=generator))
    return torch.stack(pages)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--read", action="store_true", help="read what another process wrote")
    args = parser.parse_args()
    os.environ.setdefault("LIGHTMEM_MAX_BLOCK_SIZE_MB", "1")

    kvcache = torch.zeros((PAGES, PAGE_BYTES), dtype=torch.uint8)
    service = PyLocalCacheService(
        kvcache_tensor=kvcache,
        file=str(args.directory / "cache"),
        storage_size=256 << 20,
        num_shard=4,
        num_worker=4,
    )
    hashes = cumulative(list(range(300)))
    indexer = torch.randperm(PAGES)[: len(hashes)].to(torch.int32)
    if not args.read:
        kvcache[indexer.long()] = content(hashes)

    print("held before, by block:", service.query(hashes))
    task = service.create(hash_128s=hashes, kv_page_indexer=indexer, mode="r" if args.read else "w")
    while not task.ready():
        time.sleep(0.001)
    states = task.state()
    print("states:", [state.name for state in states])
    if any(state is not PyState.Finished for state in states):
        return 1
    if args.read and not torch.equal(kvcache[indexer.long()], content(hashes)):
        print("other bytes")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
