"""Prints what a wheel's sidecar consists of: a CycloneDX 1.6 document with each part's licence.

Usage: sbom.py GO BINARY ARCH

What Go linked in is read from the binary itself; the rest is what scripts/static links with it. The
text of each licence is part of the document, as the licences ask of those who pass a program on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBZMQ = ROOT / ".cache" / "static" / "libzmq"
# Of a module, in its top directory. Another name may hold what the module bundles from elsewhere.
LICENCE_FILE = re.compile(r"^(licen[cs]e|copying|unlicense)([-.].*)?$", re.IGNORECASE)
# What only this licence's text says, in the order in which they are tried.
LICENCES = (
    ("Apache-2.0", r"Apache License\s+Version 2\.0"),
    ("MPL-2.0", r"Mozilla Public License,? [Vv]ersion 2\.0"),
    ("MIT", r"Permission is hereby granted, free of charge"),
    ("ISC", r"Permission to use, copy, modify, and/?o?r? ?distribute this software for any"),
    ("BSD-3-Clause", r"Redistribution and use.*Neither the name"),
    ("BSD-3-Clause", r"Redistribution and use.*names? of .* (may not|contributors)"),
    ("BSD-2-Clause", r"Redistribution and use"),
    ("Unlicense", r"free and unencumbered software released into the public domain"),
    ("CC0-1.0", r"CC0 1\.0 Universal"),
)


class UnknownLicence(Exception):
    pass


def licence(path: Path) -> dict[str, Any]:
    """The licence that a file holds, as CycloneDX has it."""
    text = path.read_text(encoding="utf-8", errors="replace")
    for name, pattern in LICENCES:
        if re.search(pattern, text, re.DOTALL):
            return {"id": name, "text": {"contentType": "text/plain", "content": text}}
    raise UnknownLicence(f"{path} holds no licence that packaging/sbom.py knows")


def named(name: str, *paths: Path) -> dict[str, Any]:
    """A licence without an SPDX id of one word."""
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return {"name": name, "text": {"contentType": "text/plain", "content": text}}


def component(kind: str, name: str, version: str, licences: list[dict], **more: Any) -> dict:
    return {
        "type": kind,
        "bom-ref": more.get("purl") or f"{name}@{version}",
        "name": name,
        "version": version,
        **more,
        "licenses": [{"license": one} for one in licences],
    }


def modules(go: str, binary: Path) -> list[tuple[str, str]]:
    """Path and version of each module in a Go binary but for the main one."""
    out = subprocess.run(
        [go, "version", "-m", str(binary)], check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    found = []
    for line in out.splitlines():
        kind, *rest = line.split()
        if kind == "=>":
            found[-1] = (rest[0], rest[1])
        elif kind == "dep":
            found.append((rest[0], rest[1]))
    return found


def directories(go: str, wanted: list[tuple[str, str]]) -> dict[tuple[str, str], Path]:
    """Where Go keeps the sources of modules that it has built from."""
    out = subprocess.run(
        [go, "mod", "download", "-json", *(f"{path}@{version}" for path, version in wanted)],
        check=True,
        text=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
    ).stdout
    decoder, at, found = json.JSONDecoder(), 0, {}
    while at < len(out):
        module, at = decoder.raw_decode(out, at)
        found[module["Path"], module["Version"]] = Path(module["Dir"])
        while at < len(out) and out[at].isspace():
            at += 1
    return found


def go_components(go: str, binary: Path) -> list[dict]:
    wanted = modules(go, binary)
    where = directories(go, wanted)
    found = []
    for path, version in wanted:
        files = sorted(f for f in where[path, version].iterdir() if LICENCE_FILE.match(f.name))
        if not files:
            raise UnknownLicence(f"{path} {version} has no file with its licence")
        found.append(
            component(
                "library",
                path,
                version,
                [licence(file) for file in files],
                purl=f"pkg:golang/{path}@{version}",
            )
        )
    release = subprocess.run([go, "env", "GOVERSION", "GOROOT"], check=True, text=True,
                             cwd=ROOT, stdout=subprocess.PIPE).stdout.split()  # fmt: skip
    version = release[0].removeprefix("go")
    text = licence(Path(release[1], "LICENSE"))
    found.append(component("library", "std", version, [text], purl=f"pkg:golang/std@{version}"))
    return found


def linked_components(arch: str) -> list[dict]:
    """What scripts/static links with Go's part."""
    import ziglang  # in .cache/tools, with which this is run

    zig = Path(ziglang.__file__).parent
    version = subprocess.run(
        [zig / "zig", "version"], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()
    header = (LIBZMQ / "include" / "zmq.h").read_text()
    numbers = (
        re.search(rf"define ZMQ_VERSION_{part} (\d+)", header)
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    zmq = ".".join(found.group(1) for found in numbers if found)
    llvm = "Apache-2.0 WITH LLVM-exception"
    source = f"zig {version}, for {arch}"
    return [
        component(
            "library",
            "libzmq",
            zmq,
            [
                named(
                    "LGPL-3.0-or-later, with an exception that permits static linking",
                    LIBZMQ / "COPYING.LESSER",
                )
            ],
            purl=f"pkg:github/zeromq/libzmq@v{zmq}",
        ),
        component(
            "library",
            "musl",
            musl_version(zig),
            [named("MIT and others", zig / "lib/libc/musl/COPYRIGHT")],
            description=f"from {source}",
        ),
        *(
            component(
                "library",
                name,
                f"zig-{version}",
                [named(llvm, zig / "lib" / name / "LICENSE.TXT")],
                description=f"LLVM's, from {source}",
            )
            for name in ("libcxx", "libcxxabi", "libunwind")
        ),
        component(
            "library",
            "compiler_rt",
            f"zig-{version}",
            [licence(zig / "LICENSE")],
            description=f"from {source}",
        ),
        page_component(),
    ]


def musl_version(zig: Path) -> str:
    """Of the musl that zig brings along."""
    text = (zig / "lib/libc/musl/src/internal/version.h").read_text()
    found = re.search(r'"(.+)"', text)
    assert found, f"no version in {text}"
    return found.group(1)


def page_component() -> dict:
    """The dashboard's chart library."""
    directory = ROOT / "sidecar" / "admin" / "page" / "uplot"
    found = re.search(r"uPlot \(v([\d.]+)\)", (directory / "uPlot.iife.min.js").read_text())
    assert found, "uPlot names its version in its first line"
    return component(
        "library",
        "uplot",
        found.group(1),
        [licence(directory / "LICENSE")],
        purl=f"pkg:npm/uplot@{found.group(1)}",
    )


def document(go: str, binary: Path, arch: str) -> dict[str, Any]:
    digest = hashlib.sha256(binary.read_bytes()).hexdigest()
    version = re.search(
        r'^version = "(.+)"$', (ROOT / "pyclient/pyproject.toml").read_text(), re.MULTILINE
    )
    assert version, "pyproject.toml has the version"
    parts = go_components(go, binary) + linked_components(arch)
    root = component(
        "application",
        "lookaside-kv",
        version.group(1),
        [{"id": "Apache-2.0"}],
        purl=f"pkg:pypi/lookaside-kv@{version.group(1)}",
    )
    sidecar = {
        **component("application", "lookaside", version.group(1), [{"id": "Apache-2.0"}]),
        "description": f"the sidecar, for {arch}",
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, f"lookaside-kv:{digest}").urn,
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(seconds, timezone.utc).isoformat(),
            "component": root,
        },
        "components": [sidecar, *parts],
        "dependencies": [
            {"ref": root["bom-ref"], "dependsOn": [sidecar["bom-ref"]]},
            {"ref": sidecar["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts]},
        ],
    }


def main() -> None:
    go, binary, arch = sys.argv[1:]
    try:
        json.dump(document(go, Path(binary), arch), sys.stdout, indent=1, sort_keys=True)
    except UnknownLicence as err:
        sys.exit(f"sbom: {err}")


if __name__ == "__main__":
    main()
