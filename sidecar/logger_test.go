package sidecar

import (
	"regexp"
	"runtime/debug"
	"strings"
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

// A metric's help is read alone: it does not point at that of another.
func TestHelpOfMetricsStandsAlone(t *testing.T) {
	pointing := regexp.MustCompile(
		`(?i)^of (these|those|the)\b|\b(in them|of those|become such|likewise)\b|by time\.$`)
	for _, m := range collected {
		if m.help == "" || pointing.MatchString(m.help) || !strings.HasSuffix(m.help, ".") {
			t.Errorf("%s: %q", m.name, m.help)
		}
	}
}
