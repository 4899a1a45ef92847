package admin

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// labelsOf returns the labels of each metric that there is.
func labelsOf() map[string][]string {
	there := map[string][]string{}
	for _, m := range collected {
		there[m.name] = m.labels
	}
	for name, labels := range map[string][]string{"lookaside_lookup_seconds": nil,
		"lookaside_hit_tokens": nil, "lookaside_tier_seconds": {"tier", "op"},
		"lookaside_tier_chunk_bytes": {"tier", "op"}} {
		there[name] = labels
	}
	return there
}

var metricName = regexp.MustCompile(`\blookaside_[a-z0-9_]+`)

// usesMetrics checks that all metrics in a text are there, and returns how many it names.
func usesMetrics(t *testing.T, where, text string) (n int) {
	t.Helper()
	there := labelsOf()
	for _, name := range metricName.FindAllString(text, -1) {
		n++
		if _, ok := there[name]; ok {
			continue
		}
		base := name
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			base = strings.TrimSuffix(base, suffix)
		}
		if _, ok := there[base]; !ok || base == name {
			t.Errorf("%s uses %s, which is not there", where, name)
		}
	}
	return n
}

func promtool(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("promtool", args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v (scripts/setup.sh test installs it)\n%s", strings.Join(args, " "),
			err, out)
	}
}

// TestAlerts: the alert rules use metrics that are there, are valid, and fire when they must.
func TestAlerts(t *testing.T) {
	const dir = "../../examples/prometheus"
	b, err := os.ReadFile(filepath.Join(dir, "alerts.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if n := usesMetrics(t, "alerts.yaml", string(b)); n < 10 {
		t.Errorf("alerts.yaml names %d metrics", n)
	}
	promtool(t, dir, "check", "rules", "alerts.yaml")
	promtool(t, dir, "test", "rules", "alerts_test.yaml")
}

// TestGrafanaDashboard: each panel has queries, these are valid PromQL, and they use metrics that
// are there.
func TestGrafanaDashboard(t *testing.T) {
	b, err := os.ReadFile("../../examples/grafana/lookaside.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Type, Title string
			Targets     []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(b, &board); err != nil {
		t.Fatal(err)
	}
	variables := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*")
	rules := "groups:\n- name: dashboard\n  rules:\n"
	panels := 0
	for _, p := range board.Panels {
		if p.Type == "row" {
			continue
		}
		panels++
		if len(p.Targets) == 0 {
			t.Errorf("panel %q has no query", p.Title)
		}
		for i, q := range p.Targets {
			if usesMetrics(t, p.Title, q.Expr) == 0 {
				t.Errorf("panel %q: %s names no metric", p.Title, q.Expr)
			}
			expr := variables.Replace(q.Expr)
			if strings.Contains(expr, "$") {
				t.Errorf("panel %q: %s has a variable that is not known", p.Title, q.Expr)
			}
			rules += fmt.Sprintf("  - {record: 'panel:%d:%d', expr: %q}\n", panels, i, expr)
		}
	}
	if panels < 15 {
		t.Errorf("%d panels", panels)
	}
	file := filepath.Join(t.TempDir(), "dashboard.yaml")
	if err := os.WriteFile(file, []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "", "check", "rules", file)
}
