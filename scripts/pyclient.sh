#!/usr/bin/env bash
# Installs pyclient/ into .venv, editable and with its native part built in place; again only when its sources changed.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.cache/stamps/pyclient
exec 9>.cache/pyclient.lock
flock 9
want=$({ cat pyclient/pyproject.toml pyclient/setup.py; find pyclient/lookaside -name '*.[ch]' -print0 | sort -z | xargs -0r cat; } 2>/dev/null | sha256sum | cut -d' ' -f1)
if [[ $(cat "$stamp" 2>/dev/null) == "$want" ]] && compgen -G 'pyclient/lookaside/_native*.so' >/dev/null; then
	exit 0
fi
# The package's name was lookaside once: two would both be found.
if compgen -G '.venv/lib/python3*/site-packages/lookaside-[0-9]*.dist-info' >/dev/null; then
	.cache/tools/bin/uv pip uninstall -q -p .venv/bin/python lookaside
fi
scripts/step 'build: the Python package and its native part' .cache/tools/bin/uv pip install -q -p .venv/bin/python --no-deps --no-build-isolation --reinstall-package lookaside-kv -e ./pyclient
echo "$want" >"$stamp"
