package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// available returns the commands that users see, of cmd and those below it.
func available(cmd *cobra.Command) []*cobra.Command {
	out := []*cobra.Command{cmd}
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			out = append(out, available(c)...)
		}
	}
	return out
}

// Each command has a man page with its text, its flags and its examples, the same on each run.
func TestManPages(t *testing.T) {
	write := func() map[string]string {
		t.Helper()
		dir := filepath.Join(t.TempDir(), "made", "man1")
		if _, stderr, code := run(t, []string{"SOURCE_DATE_EPOCH=1700000000"}, "man",
			dir); code != 0 {
			t.Fatal(stderr)
		}
		pages := map[string]string{}
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			path := filepath.Join(dir, f.Name())
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			pages[f.Name()] = string(b)
			for _, check := range [][]string{{"mandoc", "-Tlint", "-Wwarning"},
				// A word that does not fit its line is no mistake.
				{"groff", "-man", "-ww", "-Wbreak", "-Kutf8", "-Tutf8", "-z"}} {
				if _, err := exec.LookPath(check[0]); err != nil {
					t.Skipf("SKIPPED: %v", err)
				}
				if out, err := exec.Command(check[0], append(check[1:],
					path)...).CombinedOutput(); err != nil || len(out) > 0 {
					t.Errorf("%v: %v: %s", check, err, out)
				}
			}
		}
		return pages
	}
	pages := write()
	for name, again := range write() {
		if pages[name] != again {
			t.Errorf("%s differs from one run to the next", name)
		}
	}
	for _, cmd := range available(newRoot()) {
		name := strings.ReplaceAll(cmd.CommandPath(), " ", "-")
		page, there := pages[name+".1"]
		if !there {
			t.Errorf("there is no page %s", name)
		}
		delete(pages, name+".1")
		page = strings.ReplaceAll(page, `\-`, "-")
		want := []string{`"2023-11-14"`, name, cmd.Short}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				want = append(want, "--"+f.Name)
			}
		})
		if cmd.Example != "" {
			want = append(want, "EXAMPLE")
		}
		for _, w := range want {
			if !strings.Contains(page, w) {
				t.Errorf("%s lacks %q", name, w)
			}
		}
		if strings.Contains(page, "--ready-fd") {
			t.Errorf("%s shows a flag that is not for users", name)
		}
	}
	for name := range pages {
		if !strings.HasPrefix(name, "lookaside-completion") {
			t.Errorf("%s is of no command", name)
		}
	}
	if len(pages) != 5 {
		t.Errorf("%d pages of completion", len(pages))
	}
	if _, stderr, code := run(t, []string{"SOURCE_DATE_EPOCH=soon"}, "man", t.TempDir()); code != 1 ||
		!strings.Contains(stderr, "SOURCE_DATE_EPOCH") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	// A binary of go build in a tree without git has no date of its own.
	if _, stderr, code := run(t, nil, "man", t.TempDir()); code != 0 &&
		!strings.Contains(stderr, "set SOURCE_DATE_EPOCH") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

// Shells complete commands, flags and the values of flags; their scripts are without mistakes.
func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		script, stderr, code := run(t, nil, "completion", shell)
		if code != 0 || !strings.Contains(script, "lookaside") {
			t.Errorf("%s: exit code %d: %s", shell, code, stderr)
		}
		if _, err := exec.LookPath(shell); err != nil {
			t.Logf("%s is not here to check its script", shell)
			continue
		}
		check := exec.Command(shell, "-n")
		check.Stdin = strings.NewReader(script)
		if out, err := check.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", shell, err, out)
		}
	}
	for _, tc := range []struct {
		words []string
		want  []string
		rest  string // what the shell itself completes
	}{
		{[]string{"stat"}, []string{"status"}, ":4"},
		{[]string{"dax", ""}, []string{"add", "remove", "resize", "status"}, ":4"},
		{[]string{"serve", "--arena-kind", ""},
			[]string{"auto", "dax", "file", "hugetlb", "memfd", "thp"}, ":4"},
		{[]string{"serve", "--log-format", ""}, []string{"console", "json"}, ":4"},
		{[]string{"status", "--runtime-dir", ""}, nil, ":16"},
		{[]string{"status", "--config", ""}, []string{"yaml", "yml"}, ":8"},
		{[]string{"man"}, nil, ":4"},
	} {
		out, stderr, code := run(t, nil, append([]string{"__complete"}, tc.words...)...)
		var got []string
		rest := ""
		for line := range strings.Lines(out) {
			word, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
			if strings.HasPrefix(word, ":") {
				rest = word
			} else {
				got = append(got, word)
			}
		}
		slices.Sort(got)
		if code != 0 || !slices.Equal(got, tc.want) || rest != tc.rest {
			t.Errorf("%v: %v, %s, exit code %d: %s", tc.words, got, rest, code, stderr)
		}
	}
	out, _, _ := run(t, nil, "__complete", "serve", "--")
	for line := range strings.Lines(out) {
		if len([]rune(line)) > 250 {
			t.Errorf("too long to show beside a flag: %s", line)
		}
	}
}
