#!/usr/bin/env bash
# Makes .cache/demo, the Python of the demos: the wheel, installed as a user installs it, beside the vLLM of .venv.
# Usage: scripts/demo.sh [mooncake]
set -euo pipefail
cd "$(dirname "$0")/.."

demo=$PWD/.cache/demo
exec 9>.cache/demo.lock
flock 9
if [[ $("$demo/bin/python" -VV 2>/dev/null) != $(.venv/bin/python -VV) ]]; then
	scripts/step 'demo: making .cache/demo' .cache/tools/bin/uv venv -q --clear -p .venv/bin/python "$demo"
fi
# vLLM takes 6 GB: it is found where it is. Python reads no .pth file of a directory that it finds in such a file, so a package
# in development that .venv names does not come along.
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo "$demo"/lib/python3*/site-packages)/vllm.pth"
scripts/wheel.sh --install "$demo/bin/python"
if [[ ${1:-} == mooncake ]]; then
	scripts/step 'demo: installing Mooncake' .cache/tools/bin/uv pip install -q --no-deps -p "$demo/bin/python" \
		"$(grep '^mooncake-transfer-engine' requirements-test.lock)"
fi
