package main

import (
	"io"
	"strings"
	"testing"

	"k8s.io/pod-security-admission/api"
)

const pod = `# a comment
---
apiVersion: v1
kind: Pod
metadata: {name: x}
spec:
  securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
  containers:
    - name: c
      image: c
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
`

// What a manifest must not have is found.
func TestCheck(t *testing.T) {
	for name, tc := range map[string]struct {
		text, want string
		pods       int
		level      api.Level
	}{
		"restricted":   {text: pod, pods: 1},
		"two of them":  {text: pod + "---\n" + pod, pods: 2},
		"none":         {text: "# nothing\n", pods: 1, want: "0 pods, want 1"},
		"misspelt":     {text: pod + "      volumeMount: []\n", pods: 1, want: "volumeMount"},
		"unknown kind": {text: "apiVersion: v1\nkind: Pot\n", want: "no kind"},
		"root": {text: strings.Replace(pod, "runAsNonRoot: true, ", "", 1), pods: 1,
			want: "runAsNonRoot"},
		"capability": {text: strings.Replace(pod, "drop: [ALL]", "add: [IPC_LOCK]", 1), pods: 1,
			want: "capabilities"},
		"hostPath": {text: pod + "  volumes: [{name: v, hostPath: {path: /}}]\n", pods: 1,
			want: "hostPath"},
		"hostPath, allowed": {text: pod + "  volumes: [{name: v, hostPath: {path: /}}]\n", pods: 1,
			level: api.LevelPrivileged},
	} {
		level := tc.level
		if level == "" {
			level = api.LevelRestricted
		}
		err := check(strings.NewReader(tc.text), io.Discard, tc.pods, level)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil ||
			!strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}
