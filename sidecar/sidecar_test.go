package sidecar

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/internal/leak"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
)

const patience = 2 * time.Minute

// testDir is a directory whose name is short enough for sockets.
func testDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "la")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// logBuffer is what a sidecar has logged so far.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// startDaemon starts a sidecar with small memory of 4 KiB pages; edit may change its settings. The
// log is what it wrote so far.
func startDaemon(t *testing.T, edit func(*settings.Config)) (*Daemon, *logBuffer) {
	t.Helper()
	c := settings.Defaults()
	c.Runtime.Dir = filepath.Join(testDir(t), "rank-0") // what is beside it are its peers
	c.Arena.Kind = dax.KindMemfd
	c.Arena.Limit = 8 << 20
	c.Lifecycle.Drain = 100 * time.Millisecond
	if edit != nil {
		edit(&c)
	}
	c, err := c.Complete(nil)
	if err != nil {
		t.Fatal(err)
	}
	log := new(logBuffer)
	d, err := Start(context.Background(), c, NewLogger(c.Log, log), Origin{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return d, log
}

func dialWorker(t *testing.T, d *Daemon, pageBytes uint64) *client.Session {
	t.Helper()
	w, err := client.Dial(d.cfg.Runtime.Dir, &wire.Hello{
		Role: wire.RoleWorker, EngineID: "e", PageTokens: 16, PageBytes: pageBytes,
		PagesPerChunk: 1, DigestBytes: 32,
	}, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// next receives one message, and the region that it announces, if it does.
func next(t *testing.T, w *client.Session) (wire.Type, []byte, *wire.RegionAdded) {
	t.Helper()
	b, files, err := w.Recv(patience)
	if err != nil {
		t.Fatal(err)
	}
	typ, _ := wire.Peek(b)
	if typ != wire.TypeRegionAdded {
		return typ, b, nil
	}
	var r wire.RegionAdded
	if err := r.Decode(b, &wire.DefaultLimits); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if len(files) != 1 || unix.Fstat(int(files[0].Fd()), &st) != nil ||
		uint64(st.Size) < r.Offset+r.SizeBytes ||
		r.Kind != "file" && uint64(st.Size) != r.SizeBytes {
		t.Fatalf("region %+v came with %d files, size %d", r, len(files), st.Size)
	}
	files[0].Close()
	if err := w.Send(&wire.RegionMapped{Region: r.Region}); err != nil {
		t.Fatal(err)
	}
	return typ, b, &r
}

func TestArenaGrowsToItsLimitInTheBackground(t *testing.T) {
	const page = 64 << 10
	d, _ := startDaemon(t, func(c *settings.Config) {
		c.Arena.Limit, c.Arena.Initial = 8<<20, 1<<20
		c.Sessions.Share = 1
	})
	w := dialWorker(t, d, page)
	known := map[uint32]bool{}
	store := func(n int) {
		h := sha256.Sum256([]byte{byte(n), byte(n >> 8)})
		if err := w.Send(&wire.PrepareStore{ID: uint32(n + 1), Hashes: h[:]}); err != nil {
			t.Fatal(err)
		}
		for {
			typ, b, r := next(t, w)
			if r != nil {
				known[r.Region] = true
				continue
			}
			if typ != wire.TypeStoreGrant {
				t.Fatalf("got %v", typ)
			}
			var g wire.StoreGrant
			if err := g.Decode(b, &wire.DefaultLimits); err != nil {
				t.Fatal(err)
			}
			for _, e := range g.Grants {
				if !known[e.Region] {
					t.Fatalf("a grant names region %d, of which the worker was not told", e.Region)
				}
			}
			if g.Store != 0 {
				if err := w.Send(&wire.CommitStore{Store: g.Store}); err != nil {
					t.Fatal(err)
				}
			}
			return
		}
	}
	deadline := time.Now().Add(2 * patience)
	n := 0
	for ; d.Status().Arena.CapacityBytes < 8<<20; n++ {
		if time.Now().After(deadline) {
			t.Fatalf("%+v", d.Status().Arena)
		}
		store(n)
		time.Sleep(2 * time.Millisecond)
	}
	for range 200 {
		store(n)
		n++
	}
	st := d.Status()
	sizes := []int64{}
	for _, r := range st.Arena.Regions {
		sizes = append(sizes, r.SizeBytes)
	}
	if !slices.Equal(sizes, []int64{1 << 20, 2 << 20, 2 << 20, 2 << 20, 1 << 20}) ||
		st.Arena.CapacityBytes != 8<<20 {
		t.Errorf("regions %v", sizes)
	}
	if st.Evictions["room"] == 0 || st.Arena.GrowthFailures != 0 {
		t.Errorf("at its limit it must evict: %+v", st.Evictions)
	}
	if err := d.engine.Check(); err != nil {
		t.Error(err)
	}
	// The control region says the same to whoever polls it.
	mem, err := unix.Mmap(int(w.Control.Fd()), 0, dax.ControlSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	for wait := time.Now().Add(patience); ; {
		regions, capacity, used := binary.LittleEndian.Uint64(mem[24:]),
			binary.LittleEndian.Uint64(mem[32:]), binary.LittleEndian.Uint64(mem[40:])
		if regions == 5 && capacity == 8<<20 && used == uint64(d.Status().Arena.UsedBytes) {
			break
		}
		if time.Now().After(wait) {
			t.Fatalf("control region: %d regions, %d of %d bytes", regions, used, capacity)
		}
		time.Sleep(5 * time.Millisecond)
	}
	if err := d.Shutdown(context.Background()); err != nil {
		t.Error(err)
	}
	if state := binary.LittleEndian.Uint32(mem[12:]); state != uint32(dax.StateClosed) {
		t.Errorf("state %d after the end", state)
	}
}

// A worker that holds slots and says nothing is shown as frozen, with its process.
func TestFrozenSession(t *testing.T) {
	d, _ := startDaemon(t, func(c *settings.Config) {})
	w := dialWorker(t, d, 4096)
	if err := w.Send(&wire.PrepareStore{ID: 1, Hashes: make([]byte, 32)}); err != nil {
		t.Fatal(err)
	}
	var st admin.Status
	for end := time.Now().Add(patience); len(st.Frozen) == 0 ||
		st.FrozenSlots == 0; st = d.Status() {
		if time.Now().After(end) {
			t.Fatalf("%+v", st)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if f := st.Frozen[0]; f.PID != int32(os.Getpid()) || f.Slots != 1 || f.Stores != 1 ||
		st.FrozenSlots != 1 {
		t.Errorf("%+v with %d slots", f, st.FrozenSlots)
	}
	var table bytes.Buffer
	if err := st.WriteTable(&table); err != nil || !strings.Contains(table.String(), "FROZEN") ||
		!strings.Contains(table.String(), st.Frozen[0].Process) {
		t.Errorf("%v:\n%s", err, &table)
	}
	resp, err := http.Get("http://" + d.AdminAddr() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	for _, want := range []string{"lookaside_frozen_sessions 1\n", "lookaside_frozen_slots 1\n",
		"lookaside_froze_sessions_total 1\n"} {
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%v: the metrics have no %q", err, want)
		}
	}
}

// A worker that was given up with a store open is shown, takes a place, and holds up no shutdown.
func TestLingeringSession(t *testing.T) {
	d, _ := startDaemon(t, func(c *settings.Config) {
		c.Sessions.Limit, c.Lifecycle.Drain = 1,
			time.Hour
	})
	w := dialWorker(t, d, 4096)
	if err := w.Send(&wire.PrepareStore{ID: 1, Hashes: make([]byte, 32)}); err != nil {
		t.Fatal(err)
	}
	for typ := wire.TypeRegionAdded; typ == wire.TypeRegionAdded; {
		typ, _, _ = next(t, w)
	}
	if err := w.SendRaw([]byte{0xc1}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.Recv(patience); !errors.Is(err, io.EOF) {
		t.Fatalf("got %v, want the end", err)
	}
	var st admin.Status
	for end := time.Now().Add(patience); len(st.Lingering) == 0; st = d.Status() {
		if time.Now().After(end) {
			t.Fatalf("%+v", st)
		}
		time.Sleep(time.Millisecond)
	}
	var table bytes.Buffer
	if err := st.WriteTable(&table); err != nil || !strings.Contains(table.String(), "LINGERING") ||
		!strings.Contains(table.String(), st.Lingering[0].Session) {
		t.Errorf("%v:\n%s", err, &table)
	}
	resp, err := http.Get("http://" + d.AdminAddr() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	for _, want := range []string{"lookaside_lingering_sessions 1\n",
		"lookaside_lingered_sessions_total 1\n", "lookaside_sessions{role=\"worker\"} 0\n",
		"lookaside_stores_in_flight 1\n"} {
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%v: the metrics have no %q", err, want)
		}
	}
	_, err = client.Dial(d.cfg.Runtime.Dir, &wire.Hello{
		Role: wire.RoleWorker, EngineID: "next", PageTokens: 16, PageBytes: 4096, PagesPerChunk: 1,
		DigestBytes: 32,
	}, patience)
	var no *client.Refused
	if !errors.As(err, &no) || no.Code != wire.RefuseBusy || no.Field != "sessions.limit" {
		t.Errorf("beyond sessions.limit: %v", err)
	}
	start := time.Now()
	if err := d.Shutdown(context.Background()); err != nil {
		t.Error(err)
	}
	if took := time.Since(start); took > patience {
		t.Errorf("the shutdown took %v", took)
	}
}

// A session that asks for more than its share is told so, and so is the operator.
func TestWhatAShareCutsShortIsCounted(t *testing.T) {
	d, _ := startDaemon(t, func(c *settings.Config) {
		c.Arena.Limit, c.Sessions.Share = 1<<20,
			0.25
	})
	w := dialWorker(t, d, 64<<10) // 16 slots
	if err := w.Send(&wire.PrepareStore{ID: 1, Hashes: distinct(8)}); err != nil {
		t.Fatal(err)
	}
	var g wire.StoreGrant
	for g.ID == 0 {
		if typ, b, _ := next(t, w); typ == wire.TypeStoreGrant {
			if err := g.Decode(b, &wire.DefaultLimits); err != nil {
				t.Fatal(err)
			}
		}
	}
	if st := d.Status(); len(g.Grants) != 4 || g.Shed != 4 || st.Limited != 1 ||
		st.Counters.ShedPages != 4 {
		t.Errorf("%d slots granted, %d pages shed; %d limited", len(g.Grants), g.Shed, st.Limited)
	}
}

// distinct makes up hashes of pages.
func distinct(pages int) []byte {
	var out []byte
	for i := range pages {
		h := sha256.Sum256([]byte{byte(i)})
		out = append(out, h[:]...)
	}
	return out
}

func TestFileArenaAndItsLock(t *testing.T) {
	files := t.TempDir()
	edit := func(c *settings.Config) {
		c.Arena.Kind, c.Arena.Path, c.Arena.Limit = dax.KindFile, files, 1<<20
	}
	d, _ := startDaemon(t, edit)
	w := dialWorker(t, d, 4096)
	if _, _, r := next(t, w); r == nil || r.Kind != "file" {
		t.Errorf("region %+v", r)
	}
	c := d.cfg
	c.Runtime.Dir = filepath.Join(testDir(t), "rank-0") // what is beside it are its peers
	if _, err := Start(context.Background(), c, zap.NewNop(), Origin{}); err == nil ||
		!strings.Contains(err.Error(), files) {
		t.Errorf("a second sidecar on the same files: %v", err)
	}
}

func TestStartRefusesWhatTheHostCannotGive(t *testing.T) {
	for _, tc := range []struct {
		name string
		edit func(*settings.Config)
		want []string
	}{
		{"arena above the host's memory", func(c *settings.Config) {
			c.Arena.Limit = 1 << 50
		}, []string{"arena.limit", "1024TiB", "bytes"}},
		{"NUMA node that is not there", func(c *settings.Config) { c.Arena.NUMA = "99" },
			[]string{"arena.numa", "99"}},
		{"token file that is not there",
			func(c *settings.Config) { c.Admin.TokenFile = "/nowhere" },
			[]string{"admin.token_file", "/nowhere"}},
		{"address that is taken", func(c *settings.Config) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { ln.Close() })
			c.Admin.Listen = ln.Addr().String()
		}, []string{"admin.listen"}},
		{"path too long for a socket",
			func(c *settings.Config) {
				c.Runtime.Dir = filepath.Join(c.Runtime.Dir,
					strings.Repeat("x", 100))
			}, []string{"runtime.dir", "107"}},
		{"more sessions than descriptors", func(c *settings.Config) { c.Sessions.Limit = 1 << 40 },
			[]string{"sessions.limit"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := settings.Defaults()
			c.Runtime.Dir = filepath.Join(testDir(t), "rank-0") // what is beside it are its peers
			c.Arena.Kind = dax.KindMemfd
			c.Arena.Limit = 1 << 20
			tc.edit(&c)
			c, err := c.Complete(nil)
			if err != nil {
				t.Fatal(err)
			}
			d, err := Start(context.Background(), c, zap.NewNop(), Origin{})
			if err == nil {
				_ = d.Shutdown(context.Background())
				t.Fatal("started")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %s", err, w)
				}
			}
		})
	}
}

func TestAnAddressThatOthersReachIsWarnedAbout(t *testing.T) {
	_, log := startDaemon(t, func(c *settings.Config) { c.Admin.Listen = "0.0.0.0:0" })
	if !strings.Contains(log.String(), "other machines") {
		t.Errorf("no warning:\n%s", log)
	}
	if !strings.Contains(log.String(), "because") {
		t.Errorf("the log does not say why the arena is of its kind:\n%s", log)
	}
}

func TestMain(m *testing.M) { leak.Main(m) }

// update has tests rewrite the files that are generated.
var update = flag.Bool("update", false, "rewrite docs/openapi.json")

// load reads settings as lookaside serve does, from a YAML text, an environment and a command line.
func load(t *testing.T, text string, environ []string, args ...string) (settings.Config, error) {
	t.Helper()
	fs := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	fs.SetOutput(io.Discard)
	settings.AddFlags(fs)
	if text != "" {
		file := filepath.Join(t.TempDir(), "lookaside.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", file)
	}
	if err := fs.Parse(args); err != nil {
		return settings.Config{}, settings.FlagError(fs, err)
	}
	return settings.Load(fs, environ)
}
