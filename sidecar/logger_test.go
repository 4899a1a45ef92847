package sidecar

import (
	"runtime/debug"
	"testing"
)

func TestRevision(t *testing.T) {
	const commit = "0123456789abcdef0123456789abcdef01234567"
	for _, c := range []struct {
		info *debug.BuildInfo
		want string
	}{
		{nil, "unknown"},
		{&debug.BuildInfo{}, "unknown"},
		{&debug.BuildInfo{Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: commit},
			{Key: "vcs.modified", Value: "false"}}}, commit[:12]},
		{&debug.BuildInfo{Settings: []debug.BuildSetting{{Key: "vcs.modified", Value: "true"},
			{Key: "vcs.revision", Value: commit}}}, commit[:12] + "-dirty"},
	} {
		if got := revisionOf(c.info); got != c.want {
			t.Errorf("%+v: %s, want %s", c.info, got, c.want)
		}
	}
}
