package lint

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

const module = "lookaside"

// layers lists every package of the module, from the bottom up. A package may import those in lower
// rows only: none beside it, none above it. So tiers do not know each other, the sockets (ipc) and
// the engine meet in connector and tiers/peer only, and nothing that runs in a sidecar imports a
// bench.
var layers = [][]string{
	{"internal/bytesize", "tiers/tenant"},
	{
		"dax",              // memory, and the only unsafe
		"ipc/wire",         // messages; knows no engine types, nor sockets, nor memory
		"ipc/handover",     // messages between the process that serves and the next one
		"tiers",            // the words and the contract of a tier
		"tiers/serde",      // bytes to bytes
		"tiers/vfs",        // file operations
		"sidecar/vllm",     // vLLM's hashes
		"sidecar/systemd",  // the service manager
		"internal/lmcache", // the converter of configurations imports nothing of ours
		"internal/fakedax", "internal/frame", "internal/recording", "internal/freeport", "internal/invariants", "internal/leak", "internal/lint",
		"internal/bench", "internal/bench/zmqecho",
	},
	{
		"dax/memcopy",
		"ipc", "ipc/client", "internal/unshared",
		"tiers/policy", "tiers/why", "tiers/worth", "tiers/slab/media", "tiers/tiertest", "tiers/vfs/vfstest",
		"tiers/faults",
	},
	{
		"ipc/hosts",
		"tiers/elsewhere", // programs that are tiers
		"tiers/elsewhere/elsewheretest",
		"tiers/engine", "tiers/daxtier/mapped", "internal/prefixes",
		"internal/bench/copypool",
	},
	{"internal/simulate"}, // takes the engine's decisions
	{"internal/demand", "tiers/slab", "tiers/directory", "tiers/stack", "tiers/peer", "tiers/remote", "internal/bench/hitplot"},
	{"tiers/daxtier", "connector", "sidecar/settings"},
	{"sidecar/arena"},
	{"sidecar/admin"},
	{
		"sidecar", "sidecar/doctor",
		"internal/bench/daxbench", "internal/bench/diskbench", "internal/bench/enginebench",
		"internal/bench/memcopybench", "internal/bench/peerbench", "internal/bench/programbench", "internal/bench/redisbench",
		"internal/bench/restartbench",
	},
	{
		"sidecar/cmd/lookaside", "internal/soak",
		"internal/bench/lookupserver", "internal/bench/promotionbench",
	},
	{"internal/bench/cmd/lookaside-bench"},
}

type pkg struct {
	Dir                               string
	ImportPath                        string
	GoFiles, CgoFiles, IgnoredGoFiles []string
	TestGoFiles, XTestGoFiles         []string
	Imports                           []string
}

// rel is the package's path inside the module, "." for its root.
func (p pkg) rel() string {
	if p.ImportPath == module {
		return "."
	}
	return strings.TrimPrefix(p.ImportPath, module+"/")
}

func under(path, root string) bool {
	return path == root || strings.HasPrefix(path, root+"/")
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-e",
		"-json=Dir,ImportPath,GoFiles,CgoFiles,IgnoredGoFiles,TestGoFiles,XTestGoFiles,Imports",
		module+"/...")
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	var all []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// TestImportsPointDown reads the imports of every package, but not those of its tests.
func TestImportsPointDown(t *testing.T) {
	t.Parallel()
	row := map[string]int{}
	for i, names := range layers {
		for _, name := range names {
			row[name] = i
		}
	}
	there := map[string]bool{}
	for _, p := range packages(t) {
		there[p.rel()] = true
		mine, ok := row[p.rel()]
		if !ok {
			t.Errorf("%s is in no layer: name it in this test", p.ImportPath)
			continue
		}
		for _, imported := range p.Imports {
			if rel, ours := strings.CutPrefix(imported, module+"/"); ours && row[rel] >= mine {
				t.Errorf("%s imports %s, which is above it or beside it", p.rel(), rel)
			}
		}
	}
	for name := range row {
		if !there[name] {
			t.Errorf("%s has a layer, but does not exist", name)
		}
	}
}

// TestBenchesStayOut: what a user installs is built without the benches and without what draws
// charts.
func TestBenchesStayOut(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-deps", module+"/sidecar/cmd/lookaside").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range strings.Fields(string(out)) {
		if under(name, module+"/internal/bench") || under(name, module+"/internal/prefixes") ||
			under(name, "gonum.org") {
			t.Errorf("lookaside is built with %s", name)
		}
	}
}

// TestWireStandsAlone: the messages are bytes to fields and back; a decoder that could reach a
// socket, a mapping or the engine could be made to use it.
func TestWireStandsAlone(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		if !under(p.rel(), "ipc/wire") {
			continue
		}
		for _, imported := range p.Imports {
			if under(imported, module) && !under(imported, module+"/ipc/wire") {
				t.Errorf("%s imports %s", p.rel(), imported)
			}
			if slices.Contains([]string{"net", "os", "syscall", "unsafe", "golang.org/x/sys/unix"},
				imported) {
				t.Errorf("%s imports %s", p.rel(), imported)
			}
		}
	}
}

// TestDangerIsConfined reads every source that is not a test: unsafe and mappings belong to dax,
// cgo to ipc (which may need unsafe in the files that do cgo), and zap is handed in, never reached
// for.
func TestDangerIsConfined(t *testing.T) {
	t.Parallel()
	files := token.NewFileSet()
	for _, p := range packages(t) {
		for _, name := range slices.Concat(p.GoFiles, p.CgoFiles, p.IgnoredGoFiles) {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			path := filepath.Join(p.Dir, name)
			file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Error(err)
				continue
			}
			imports := map[string]string{} // local name to path
			for _, spec := range file.Imports {
				imported, _ := strconv.Unquote(spec.Path.Value)
				local := imported[strings.LastIndexByte(imported, '/')+1:]
				if spec.Name != nil {
					local = spec.Name.Name
				}
				imports[local] = imported
			}
			where := filepath.Join(p.rel(), name)
			_, usesC := imports["C"]
			if usesC && !under(p.rel(), "ipc") {
				t.Errorf("%s uses cgo, which only ipc may", where)
			}
			if _, ok := imports["unsafe"]; ok && !under(p.rel(), "dax") &&
				!(usesC && under(p.rel(), "ipc")) {
				t.Errorf("%s imports unsafe, which only dax may", where)
			}
			ast.Inspect(file, func(n ast.Node) bool {
				sel, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				x, ok := sel.X.(*ast.Ident)
				if !ok {
					return true
				}
				at := files.Position(sel.Pos())
				switch imported := imports[x.Name]; {
				case imported == "go.uber.org/zap" &&
					slices.Contains([]string{"L", "S", "ReplaceGlobals", "RedirectStdLog"},
						sel.Sel.Name):
					t.Errorf("%s:%d: zap.%s: the logger is passed in, never global", where, at.Line,
						sel.Sel.Name)
				case (imported == "syscall" || imported == "golang.org/x/sys/unix") &&
					slices.Contains([]string{"Mmap", "MmapPtr", "Munmap", "MunmapPtr", "Mremap",
						"MemfdCreate", "SYS_MMAP"}, sel.Sel.Name) &&
					!under(p.rel(), "dax") && !under(p.rel(), "internal"):
					t.Errorf("%s:%d: %s.%s: memory is mapped in dax only", where, at.Line, x.Name,
						sel.Sel.Name)
				}
				return true
			})
		}
	}
}

// columns is the longest a line of Go may be, with tabs of 4. The spaces by which gofmt aligns
// columns do not count.
const columns = 100

var aligned = regexp.MustCompile(`(\S) {2,}`)

// TestLinesAreShort reads every Go source. A line may only be longer if it ends in a string, which
// is better found whole.
func TestLinesAreShort(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("git", "-C", "../..", "ls-files", "--cached", "--others",
		"--exclude-standard", "*.go").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range strings.Fields(string(out)) {
		b, err := os.ReadFile(filepath.Join("../..", name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		raw := false // inside a string of several lines
		for i, line := range strings.Split(string(b), "\n") {
			was := raw
			if !strings.HasPrefix(strings.TrimSpace(line), "//") &&
				strings.Count(line, "`")%2 == 1 {
				raw = !raw
			}
			if was || raw {
				continue
			}
			width := utf8.RuneCountInString(aligned.ReplaceAllString(strings.ReplaceAll(line, "\t",
				"    "),
				"$1 "))
			if width > columns && !endsInString(line) {
				t.Errorf("%s:%d: %d columns, at most %d", name, i+1, width, columns)
			}
		}
	}
}

// endsInString reports whether the line's part beyond the limit belongs to a string, but for what
// closes the statement.
func endsInString(line string) bool {
	at := strings.LastIndexAny(line, "\"`")
	if at < 0 || strings.HasPrefix(strings.TrimSpace(line), "//") {
		return false
	}
	return utf8.RuneCountInString(strings.ReplaceAll(line[:at], "\t", "    ")) >= columns-40
}

// TestNamedTestsExist: docs/testing.md says which test shows what, and docs/arm.md which tests
// emulation leaves out. A test that was renamed or deleted must not leave its name behind.
func TestNamedTestsExist(t *testing.T) {
	t.Parallel()
	defined := map[string]bool{}
	definition := regexp.MustCompile(`(?m)^(?:func |\s*def )((?:Test|Fuzz)[A-Z]\w*|test_\w+)`)
	err := filepath.WalkDir("../..", func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && strings.HasPrefix(e.Name(), ".") && path != "../..":
			return filepath.SkipDir
		case !strings.HasSuffix(path, "_test.go") && !(strings.HasPrefix(e.Name(), "test_") &&
			strings.HasSuffix(path, ".py")):
			return nil
		}
		b, err := os.ReadFile(path)
		for _, m := range definition.FindAllSubmatch(b, -1) {
			defined[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w*|test_\\w+)`")
	for _, c := range []struct {
		doc, section string
		least        int
	}{{"docs/testing.md", "Faults", 49}, {"docs/arm.md", "What emulation cannot do", 10}} {
		doc, err := os.ReadFile("../../" + c.doc)
		if err != nil {
			t.Fatal(err)
		}
		_, rest, ok := strings.Cut(string(doc), "\n## "+c.section+"\n")
		table, _, _ := strings.Cut(rest, "\n## ")
		named := names.FindAllStringSubmatch(table, -1)
		if !ok || len(named) < c.least {
			t.Fatalf("%s names %d tests in its table", c.doc, len(named))
		}
		for _, m := range named {
			if !defined[m[1]] {
				t.Errorf("%s names %s, which does not exist", c.doc, m[1])
			}
		}
	}
}
