package main

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/syntax"
)

// A block is what a document shows between two fences.
type block struct {
	at, kind, text string
}

var fences = regexp.MustCompile("(?ms)^( *)```(\\w*)\n(.*?)^ *```$")

// blocks returns the blocks of all documents for users.
func blocks(t *testing.T) (out []block) {
	t.Helper()
	const root = "../../.."
	var files []string
	for _, pattern := range []string{"*.md", "docs/*.md", "examples/*/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range fences.FindAllSubmatch(b, -1) {
			text := regexp.MustCompile("(?m)^"+string(m[1])).ReplaceAllString(string(m[3]), "")
			first, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
			out = append(out, block{filepath.Base(file) + ": " + first, string(m[2]), text})
		}
	}
	return out
}

// shellStart begins a block without a kind that is for a shell.
var shellStart = regexp.MustCompile(`^(#|[A-Z_]+=|(lookaside|vllm|for|export|make|sudo|curl|pip|python|install|git|kubectl|systemctl|mkdir|bench/run|perf) )`)

// commands returns what of a block is for a shell: what stands behind the prompts, with the lines
// that continue it, or the whole block.
func (b *block) commands() (string, bool) {
	switch b.kind {
	case "sh", "bash":
		return b.text, true
	case "console":
		var out strings.Builder
		goesOn := false
		for line := range strings.Lines(b.text) {
			command, prompt := strings.CutPrefix(line, "$ ")
			if prompt || goesOn {
				out.WriteString(command)
				goesOn = strings.HasSuffix(strings.TrimRight(command, "\n"), `\`)
			}
		}
		return out.String(), true
	case "":
		return b.text, shellStart.MatchString(strings.TrimSpace(b.text))
	}
	return "", false
}

// TestDocumentedCommands parses what the documents show: commands are a shell's, those of lookaside
// exist and have the flags, and JSON and YAML are well-formed.
func TestDocumentedCommands(t *testing.T) {
	parser := syntax.NewParser()
	seen := map[string]int{}
	for _, b := range blocks(t) {
		switch b.kind {
		case "json":
			seen["json"]++
			if !json.Valid([]byte(b.text)) && !json.Valid([]byte("{"+b.text+"}")) { // or a part
				t.Errorf("%s: this is no JSON:\n%s", b.at, b.text)
			}
			continue
		case "yaml":
			seen["yaml"]++
			for d := yaml.NewDecoder(strings.NewReader(b.text)); ; {
				var any any
				if err := d.Decode(&any); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Errorf("%s: %v", b.at, err)
					break
				}
			}
			continue
		}
		text, ok := b.commands()
		if !ok {
			if strings.Contains("\n"+b.text, "\nlookaside ") {
				seen["output"]++
			}
			continue
		}
		file, err := parser.Parse(strings.NewReader(text), "")
		if err != nil {
			t.Errorf("%s: %v:\n%s", b.at, err, text)
			continue
		}
		env := func(name string) string {
			if name == "IFS" {
				return "" // the usual one
			}
			return "0"
		}
		for _, a := range assigned(file) {
			was := env
			env = func(name string) string {
				if name == a.Name.Value && a.Value != nil {
					s, _ := expand.Literal(&expand.Config{Env: expand.FuncEnviron(was)}, a.Value)
					return s
				}
				return was(name)
			}
		}
		syntax.Walk(file, func(node syntax.Node) bool {
			if call, ok := node.(*syntax.CallExpr); ok {
				words, err := expand.Fields(&expand.Config{Env: expand.FuncEnviron(env),
					CmdSubst: func(w io.Writer, _ *syntax.CmdSubst) error {
						_, err := io.WriteString(w, "0")
						return err
					}}, call.Args...)
				if err != nil {
					t.Errorf("%s: %v", b.at, err)
				} else if what, err := documented(words); err != nil {
					t.Errorf("%s: %q: %v", b.at, words, err)
				} else {
					seen[what]++
				}
			}
			return true
		})
	}
	t.Logf("%v", seen)
	for what, want := range map[string]int{"lookaside": 45, "vllm": 8, "json": 3, "yaml": 9} {
		if seen[what] < want {
			t.Errorf("%d of %s were found, want %d or more", seen[what], what, want)
		}
	}
}

// assigned returns the assignments of a script that stand alone.
func assigned(file *syntax.File) (out []*syntax.Assign) {
	for _, s := range file.Stmts {
		if call, ok := s.Cmd.(*syntax.CallExpr); ok && len(call.Args) == 0 {
			out = append(out, call.Assigns...)
		}
	}
	return out
}

// documented checks a command that a document shows, and returns whose it is.
func documented(words []string) (string, error) {
	if i := slices.IndexFunc(words, func(w string) bool {
		return filepath.Base(w) == "lookaside"
	}); i >= 0 && (i == 0 || words[0] == "sudo" || words[0] == "exec" || words[0] == "numactl") {
		root := newRoot()
		cmd, rest, err := root.Find(words[i+1:])
		if err != nil {
			return "", err
		}
		cmd.InitDefaultHelpFlag()
		cmd.InitDefaultVersionFlag()
		if err := cmd.ParseFlags(rest); err != nil && !errors.Is(err, pflag.ErrHelp) {
			return "", err
		}
		return "lookaside", nil
	}
	if len(words) > 1 && words[0] == "vllm" && words[1] == "serve" {
		for i, w := range words {
			if value, ok := strings.CutPrefix(w, "--kv-transfer-config"); ok {
				if value = strings.TrimPrefix(value, "="); value == "" && i+1 < len(words) {
					value = words[i+1]
				}
				var config struct {
					Connector string         `json:"kv_connector"`
					Extra     map[string]any `json:"kv_connector_extra_config"`
				}
				if err := json.Unmarshal([]byte(value), &config); err != nil {
					return "", err
				}
				if config.Connector == "" {
					return "", errors.New("it names no connector")
				}
			}
		}
		return "vllm", nil
	}
	return "other", nil
}
