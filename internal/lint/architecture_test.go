package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestNamedPathsExist: docs/architecture.md leads readers to files and functions. A file that moved
// or a function that was renamed must be followed there. Named are `path` and `path: Function`,
// between backticks, where path begins at the root of the repository.
func TestNamedPathsExist(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	roots := map[string]bool{}
	entries, err := os.ReadDir("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		roots[e.Name()] = true
	}
	named := regexp.MustCompile("`([A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*)(?:: ([A-Za-z0-9_]+))?`")
	paths, functions := 0, 0
	for _, m := range named.FindAllStringSubmatch(strings.ReplaceAll(string(doc), "\n", " "), -1) {
		path, function := m[1], m[2]
		root, _, deep := strings.Cut(path, "/")
		if !deep && function == "" && !roots[root] {
			continue // a word, not a path
		}
		paths++
		name := filepath.Join("../..", path)
		if _, err := os.Stat(name); err != nil {
			t.Errorf("docs/architecture.md names %s, which does not exist", path)
			continue
		}
		if function == "" {
			continue
		}
		functions++
		source, err := os.ReadFile(name)
		if err != nil {
			t.Error(err)
			continue
		}
		// a function, method, class or type
		defined := `(?m)^(func (\([^)]*\) )?|\s*(async )?def |class |type )` + function + `\b`
		if !regexp.MustCompile(defined).Match(source) {
			t.Errorf("docs/architecture.md names %s in %s, which does not define it", function, path)
		}
	}
	if paths < 60 || functions < 40 {
		t.Fatalf("docs/architecture.md names %d paths and %d functions", paths, functions)
	}
}
