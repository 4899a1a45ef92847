package sidecar

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// Each example of how sidecars are deployed has settings and command lines that `lookaside serve` takes.
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
		if _, err := Parse(name, read(name, "sidecar.yaml"), nil); err != nil {
			t.Errorf("%s/sidecar.yaml: %v", name, err)
		}
	}

	lines := 0
	for line := range strings.Lines(string(read("systemd", "lookaside@.service"))) {
		if command, ok := strings.CutPrefix(strings.TrimSpace(line), "ExecStart=/usr/local/bin/lookaside serve "); ok {
			lines++
			if _, err := load(t, "", nil, strings.Fields(strings.ReplaceAll(command, "%i", "llama-0"))...); err != nil {
				t.Errorf("systemd: %s: %v", command, err)
			}
		}
	}
	if lines != 1 {
		t.Errorf("systemd: %d command lines", lines)
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

type podSpec struct {
	InitContainers []container `yaml:"initContainers"`
	Containers     []container
}

type container struct {
	Name string
	Args []string
}
