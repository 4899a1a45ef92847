package sidecar

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"lookaside/ipc"
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

	for name, sidecars := range map[string]int{"sidecar-container.yaml": 1, "daemonset.yaml": 2} {
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
				args := slices.Clone(c.Args[1:])
				// The file is a volume's.
				i := slices.Index(args, "--config")
				if i < 0 {
					t.Fatalf("%s: %s names no settings", name, c.Name)
				}
				if _, err := load(t, settings, nil, slices.Delete(args, i, i+2)...); err != nil {
					t.Errorf("%s: %s: %v", name, c.Name, err)
				}
			}
		}
		if found != sidecars {
			t.Errorf("%s: %d sidecars, want %d", name, found, sidecars)
		}
	}
}

// The image is built by the Go that go.mod names, and with the libzmq that these tests run with.
func TestImageIsOfTheVersionsThatAreTested(t *testing.T) {
	read := func(path ...string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(append([]string{".."}, path...)...))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	find := func(text, pattern string) string {
		t.Helper()
		m := regexp.MustCompile(pattern).FindStringSubmatch(text)
		if m == nil {
			t.Fatalf("nothing is like %s", pattern)
		}
		return m[1]
	}
	dockerfile := read("examples", "kubernetes", "Dockerfile")
	if wants, has := find(read("go.mod"), `(?m)^toolchain go(\S+)$`),
		find(dockerfile, `FROM golang:(\S+)-bookworm`); wants != has {
		t.Errorf("go.mod wants Go %s, and the image is built by %s", wants, has)
	}
	pinned := find(dockerfile, `(?m)^ARG LIBZMQ=(\d+\.\d+\.\d+)-\d+$`)
	if strings.Count(dockerfile, "${LIBZMQ}") != 2 {
		t.Error("libzmq is not pinned both where it is built with and where it runs")
	}
	if runs := ipc.LibraryVersion(); runs != pinned {
		t.Logf("the image has libzmq %s, and these tests run with %s", pinned, runs)
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
