package admin

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"lookaside/sidecar/settings"
)

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

// docs/operations.md explains every metric that there is, and none that there is not.
func TestEveryMetricIsExplained(t *testing.T) {
	doc, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	m, reg := NewMetrics([]settings.TierConfig{{Name: "disk"}}), prometheus.NewRegistry()
	reg.MustRegister(m.lookupSeconds, m.hitTokens, m.tierSeconds, m.tierBytes)
	families, err := reg.Gather()
	if err != nil || len(families) != 4 {
		t.Fatalf("%v: %d histograms", err, len(families))
	}
	for _, f := range families {
		there[f.GetName()] = true
	}
	for _, m := range collected {
		there[m.name] = true
	}
	for name := range there {
		if !strings.Contains(string(doc), "`"+name) {
			t.Errorf("docs/operations.md does not explain %s", name)
		}
	}
	for _, part := range strings.Split(string(doc), "`")[1:] {
		name, _, _ := strings.Cut(part, "{")
		if strings.HasPrefix(name, "lookaside_") && !strings.ContainsAny(name, " \n*") &&
			!there[name] {
			t.Errorf("docs/operations.md explains %s, which is not there", name)
		}
	}
}
