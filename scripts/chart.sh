#!/usr/bin/env bash
# Checks the Helm chart: helm lint, values that must be refused, and each set of values rendered, decoded strictly
# and checked against the Pod Security level restricted. Compares examples/kubernetes/vllm.yaml with what the chart
# renders; UPDATE=1 writes it. helm and Kubernetes' own code come from packaging/helm/check/go.mod and take minutes
# to build the first time.
set -euo pipefail
export LC_ALL=C # the order of files
cd "$(dirname "$0")/.."
chart=packaging/helm/lookaside
example=examples/kubernetes/vllm.yaml
kubernetes=1.33
go=$(command -v .cache/tools/bin/go || command -v go)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

scripts/step 'chart: building helm and the check' "$go" -C packaging/helm/check build -o "$work/" . helm.sh/helm/v3/cmd/helm
# helm says of each file of the chart that is a link that it is one.
helm() { "$work/helm" "$@" 2> >(grep -v 'found symbolic link' >&2); }
render() { helm template vllm "$chart" --kube-version "$kubernetes" "$@"; }

helm lint --strict --quiet "$chart"
(cd packaging/helm/check && "$go" vet . && "$go" test .)
for values in "$chart"/values.yaml "$chart"/ci/*.yaml; do
	echo "chart: ${values#"$chart"/}"
	render -f "$values" >"$work/rendered.yaml"
	"$work/lookaside-chart-check" -pods 1 <"$work/rendered.yaml"
done
for wrong in tensorParallelSize=0 arena.size=3 vllm.connector=conda image.digest=sha256:1 admin.port=0 user=0 model=; do
	if render --set "$wrong" >/dev/null 2>&1; then
		echo "chart: $wrong is not refused" >&2
		exit 1
	fi
done
if helm template vllm "$chart" --kube-version 1.28 >/dev/null 2>&1; then
	echo "chart: a Kubernetes without native sidecars is not refused" >&2
	exit 1
fi
# It needs a directory of the node, which restricted does not allow.
"$work/lookaside-chart-check" -level privileged -pods 2 <examples/kubernetes/daemonset.yaml

{
	echo "# vLLM with its sidecar in the same pod, as the chart renders it: for those who do not use Helm."
	echo "# kubectl create secret generic lookaside-token --from-literal=token=\$(openssl rand -hex 16)"
	echo "# kubectl apply -f vllm.yaml"
	echo "# Made by make chart UPDATE=1 from $chart: $(cat "$chart"/{Chart,values}.yaml "$chart"/templates/* | sha256sum | cut -c1-16)"
	render --set admin.tokenSecret=lookaside-token --set networkPolicy.enabled=false
} >"$work/example.yaml"
if [[ ${UPDATE:-} ]]; then
	cp "$work/example.yaml" "$example"
elif ! diff -u "$example" "$work/example.yaml"; then
	echo "chart: $example is not what the chart renders: make chart UPDATE=1" >&2
	exit 1
fi
