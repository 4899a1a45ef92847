package sidecar

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"lookaside/dax"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/settings"
)

// ourNames are all files and directories that a sidecar makes, in its endpoint (run), in an arena
// of files, on a disk and in a bucket.
var ourNames = regexp.MustCompile(
	`^(run(/peer-[0-9a-f]{16}\.sock)?(/rank-0(/(lock|directory|[a-z-]+\.sock|reply-[0-9a-f]+(-[0-9]+)?\.sock|admin\.addr))?)?` +
		`|arena(/lookaside-region-[0-9]{4})?|disk(/(lock|slab-[0-9]{3}))?|s3(/kv-cache(/here(/[0-9a-f]{64}(/[0-9a-f]{64}(/[0-9a-f]{64}-[0-9]+)?)?)?)?)?)$`)

// Fault 44: whatever clients call themselves, their model or their pages, no file or object has a
// name from it, and none is made anywhere else.
func TestNamesOfClientsAreNoPaths(t *testing.T) {
	names := map[string]string{
		"parents":    "../../../../escaped",
		"absolute":   "/tmp/escaped",
		"separator":  "a-SEP-b-SEP-../escaped",
		"long":       strings.Repeat("n", 256),
		"zero byte":  "escaped\x00.sock",
		"line":       "escaped\nescaped",
		"dots":       "..",
		"not UTF-8":  "escaped\xff\xfe",
		"expansion":  "$(touch escaped) `touch escaped` %n%s ~/escaped",
		"windows":    `..\..\escaped`,
		"hidden":     ".escaped",
		"wide slash": "..\u2215escaped\u2044escaped",
	}
	base := filepath.Join(testDir(t), "base")
	for _, dir := range []string{"run", "arena", "s3/kv-cache"} {
		if err := os.MkdirAll(filepath.Join(base, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	addr, _ := freeAddr(t)
	versity, err := filepath.Abs("../.cache/tools/bin/versitygw")
	if err != nil {
		t.Fatal(err)
	}
	bucket := &remoteServer{addr: addr, args: []string{versity, "--port", addr, "--quiet", "posix",
		filepath.Join(base, "s3")},
		env: []string{"ROOT_ACCESS_KEY=somebody", "ROOT_SECRET_KEY=" + remotePassword}}
	t.Setenv("AWS_ACCESS_KEY_ID", "somebody")
	t.Setenv("AWS_SECRET_ACCESS_KEY", remotePassword)
	bucket.start(t)
	below := withTiers(t, "--disk="+filepath.Join(base, "disk")+":16M:slab=512K",
		"--s3=s3://kv-cache/here?region=us-east-1&endpoint=http://"+addr)
	d, _ := startDaemon(t, func(c *settings.Config) {
		below(c)
		c.Runtime.Dir = filepath.Join(base, "run", "rank-0")
		c.Arena.Kind, c.Arena.Path, c.Arena.Limit = dax.KindFile, filepath.Join(base, "arena"),
			16<<20
		c.Spaces.Limit = 2 * len(names)
	})
	stored := 0
	for what, name := range names {
		digest := sha256.Sum256([]byte(name))
		for _, hello := range []wire.Hello{
			{EngineID: name}, {EngineID: what, Fields: []wire.Field{{Key: "model", Value: name}}},
			{EngineID: what + " key", Fields: []wire.Field{{Key: name, Value: "x"}}},
		} {
			hello.Role, hello.PageTokens, hello.PageBytes, hello.PagesPerChunk, hello.DigestBytes =
				wire.RoleWorker, 16, 4096, 1, 32
			w, err := client.Dial(d.cfg.Runtime.Dir, &hello, patience)
			if err != nil { // it is not let in, which is as good
				continue
			}
			if n := copy(digest[:], name); n > 0 && n < len(digest) {
				digest[len(digest)-1]++
			}
			if err := w.Send(&wire.PrepareStore{ID: 1, Hashes: digest[:]}); err != nil {
				t.Fatal(err)
			}
			for {
				typ, b, region := next(t, w)
				if region != nil {
					continue
				}
				if typ != wire.TypeStoreGrant {
					t.Fatalf("%s: %v", what, typ)
				}
				var g wire.StoreGrant
				if err := g.Decode(b, &wire.DefaultLimits); err != nil {
					t.Fatal(err)
				}
				if g.Store != 0 {
					stored++
					if err := w.Send(&wire.CommitStore{Store: g.Store}); err != nil {
						t.Fatal(err)
					}
				}
				break
			}
			s, err := client.Dial(d.cfg.Runtime.Dir, &wire.Hello{Role: wire.RoleScheduler,
				EngineID: hello.EngineID, PageTokens: 16, PagesPerChunk: 1, DigestBytes: 32},
				patience)
			if err == nil { // it has sockets of its own
				s.Close()
			}
			w.Close()
		}
	}
	if stored < len(names) {
		t.Errorf("%d pages were stored for %d names", stored, len(names))
	}
	until(t, func() any { return d.operations.Tiers() }, func() bool {
		return int(d.operations.Tiers()[0].StoredChunks) >= stored &&
			int(d.operations.Tiers()[1].StoredChunks) >= stored
	})
	objects := 0
	if err := filepath.WalkDir(filepath.Dir(base), func(path string, e fs.DirEntry,
		err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(base, path)
		if name == "." || name == ".." {
			return nil
		}
		if strings.HasPrefix(e.Name(), ".vgw") || strings.HasPrefix(e.Name(), ".sgw") {
			// the gateway's
			return fs.SkipDir
		}
		if !ourNames.MatchString(name) {
			t.Errorf("%q is not a name of ours", name)
		}
		if strings.Count(name, "/") == 5 {
			objects++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if objects < stored {
		t.Errorf("%d objects for %d pages", objects, stored)
	}
	if strings.Contains(fmt.Sprint(os.ReadDir("/tmp")), "escaped") {
		t.Error("something has escaped to /tmp")
	}
}
