package sidecar

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"lookaside/sidecar/settings"
)

// Each example of how sidecars are deployed has settings and command lines that `lookaside serve`
// takes.
func TestExamplesAreTaken(t *testing.T) {
	read := func(path ...string) []byte {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(append([]string{"..", "examples"}, path...)...))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, name := range []string{"systemd", "redis"} {
		if _, err := settings.Parse(name, read(name, "sidecar.yaml"), nil); err != nil {
			t.Errorf("%s/sidecar.yaml: %v", name, err)
		}
	}

	lines := 0
	for line := range strings.Lines(string(read("systemd", "lookaside@.service"))) {
		if command, ok := strings.CutPrefix(strings.TrimSpace(line),
			"ExecStart=/usr/local/bin/lookaside serve "); ok {
			lines++
			if _, err := load(t, "", nil, strings.Fields(strings.ReplaceAll(command, "%i",
				"llama-0"))...); err != nil {
				t.Errorf("systemd: %s: %v", command, err)
			}
		}
	}
	if lines != 1 {
		t.Errorf("systemd: %d command lines", lines)
	}

	// What the unit's Documentation names is what deployment.md installs.
	documentation := ""
	for line := range strings.Lines(string(read("systemd", "lookaside@.service"))) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "Documentation=file:"); ok {
			documentation = path
		}
	}
	deployment := string(read("..", "docs", "deployment.md"))
	if _, err := os.Stat(filepath.Join("..", "docs", filepath.Base(documentation))); err != nil ||
		!strings.Contains(deployment, "-t "+filepath.Dir(documentation)+" docs/*.md") {
		t.Errorf("systemd: nothing installs %s (%v)", documentation, err)
	}

	// Prometheus finds the sidecars where their env files put them.
	var listens, targets []string
	for _, name := range []string{"llama-0.env", "llama-1.env"} {
		var environ []string
		for line := range strings.Lines(string(read("systemd", name))) {
			line = strings.TrimSpace(line)
			if assignment := strings.TrimPrefix(line, "#"); strings.Contains(assignment, "=") &&
				!strings.Contains(assignment, " ") {
				environ = append(environ, assignment) // those that are offered, too
			}
		}
		c, err := load(t, string(read("systemd", "sidecar.yaml")), environ)
		if err != nil || len(environ) != 3 {
			t.Errorf("systemd/%s: %v: %v", name, environ, err)
		}
		listens = append(listens, c.Admin.Listen)
	}
	var prometheus struct {
		ScrapeConfigs []struct {
			JobName       string                       `yaml:"job_name"`
			StaticConfigs []struct{ Targets []string } `yaml:"static_configs"`
			Authorization struct {
				CredentialsFile string `yaml:"credentials_file"`
			}
		} `yaml:"scrape_configs"`
	}
	strict := yaml.NewDecoder(bytes.NewReader(read("prometheus", "scrape.yaml")))
	strict.KnownFields(true)
	if err := strict.Decode(&prometheus); err != nil {
		t.Fatal(err)
	}
	for _, job := range prometheus.ScrapeConfigs {
		for _, static := range job.StaticConfigs {
			targets = append(targets, static.Targets...)
		}
	}
	if !slices.Equal(listens, targets) {
		t.Errorf("prometheus looks at %v, and the sidecars listen on %v", targets, listens)
	}

	for name, sidecars := range map[string]int{"vllm.yaml": 1, "daemonset.yaml": 2} {
		settings, found := "", 0
		for decoder := yaml.NewDecoder(bytes.NewReader(read("kubernetes", name))); ; {
			var object struct {
				Data map[string]string
				Spec struct{ Template struct{ Spec podSpec } }
			}
			if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if text := object.Data["sidecar.yaml"]; text != "" {
				settings = text
			}
			pod := object.Spec.Template.Spec
			for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
				if len(c.Args) == 0 || c.Args[0] != "serve" {
					continue
				}
				found++
				// The file is a volume's.
				const config = "--config=/etc/lookaside/sidecar.yaml"
				args := slices.DeleteFunc(slices.Clone(c.Args[1:]), func(arg string) bool {
					return arg == config
				})
				if len(args) != len(c.Args)-2 {
					t.Fatalf("%s: %s names no settings", name, c.Name)
				}
				if _, err := load(t, settings, nil, args...); err != nil {
					t.Errorf("%s: %s: %v", name, c.Name, err)
				}
			}
		}
		if found != sidecars {
			t.Errorf("%s: %d sidecars, want %d", name, found, sidecars)
		}
	}
}

// The manifest that the chart has rendered is of the chart as it is now: make chart UPDATE=1.
func TestChartIsRendered(t *testing.T) {
	chart := filepath.Join("..", "packaging", "helm", "lookaside")
	templates, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	if err != nil || len(templates) == 0 {
		t.Fatalf("no templates: %v", err)
	}
	slices.Sort(templates)
	sum := sha256.New()
	for _, path := range append([]string{filepath.Join(chart, "Chart.yaml"),
		filepath.Join(chart, "values.yaml")}, templates...) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		sum.Write(b)
	}
	rendered, err := os.ReadFile(filepath.Join("..", "examples", "kubernetes", "vllm.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("%x", sum.Sum(nil))[:16]; !strings.Contains(string(rendered),
		"packaging/helm/lookaside: "+want+"\n") {
		t.Errorf("vllm.yaml was rendered from another chart, not from %s: make chart UPDATE=1", want)
	}
	version, err := os.ReadFile(filepath.Join(chart, "Chart.yaml"))
	if err != nil || !strings.Contains(string(version), "\nappVersion: "+Version+"\n") {
		t.Errorf("Chart.yaml is not of release %s: %v", Version, err)
	}
}

type podSpec struct {
	InitContainers []container `yaml:"initContainers"`
	Containers     []container
}

type container struct {
	Name string
	Args []string
}
