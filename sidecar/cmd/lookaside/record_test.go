package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"lookaside/internal/prefixes"
	"lookaside/internal/simulate"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
)

// recordProcess is a lookaside record that has begun.
type recordProcess struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout bytes.Buffer
	stderr *bufio.Reader
}

func startRecord(t *testing.T, dir string, args ...string) *recordProcess {
	t.Helper()
	r := &recordProcess{t: t, cmd: exec.Command(binary, append([]string{"record", "--runtime-dir",
		dir}, args...)...)}
	r.cmd.Stdout = &r.stdout
	pipe, err := r.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.stderr = bufio.NewReader(pipe)
	if line, err := r.stderr.ReadString('\n'); !strings.Contains(line, "recording the requests") {
		t.Fatal(line, err)
	}
	return r
}

// wait waits for its end.
func (r *recordProcess) wait() error {
	_, _ = r.stderr.WriteTo(os.Stderr)
	return r.cmd.Wait()
}

// asker asks a sidecar as vLLM does: it looks a prompt up, and stores what was not found.
type asker struct {
	t       *testing.T
	worker  *client.Session
	ses     *client.Session
	lookups *client.Lookups
	lookup  uint64
}

func (s *server) asker() *asker {
	s.t.Helper()
	a := &asker{t: s.t, worker: s.worker()}
	var err error
	if a.ses, err = client.Dial(s.dir, hello(wire.RoleScheduler), patience); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { a.ses.Close() })
	if a.lookups, err = a.ses.Lookups(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { a.lookups.Close() })
	return a
}

// ask asks for pages of 4 a chunk, and returns how many were found.
func (a *asker) ask(pages []byte) int {
	a.t.Helper()
	a.lookup++
	id, secret := a.ses.Welcome.Session, a.ses.Welcome.Secret
	res, err := a.lookups.Lookup(&wire.Lookup{Session: id, Secret: secret, Lookup: a.lookup,
		Hashes: pages}, patience)
	if err != nil {
		a.t.Fatal(err)
	}
	if err := a.lookups.Send((&wire.Cancel{Session: id, Secret: secret,
		Lookup: a.lookup}).Append(nil)); err != nil {
		a.t.Fatal(err)
	}
	first := int(res.HitPages) / 4 * 4
	if 32*first == len(pages) {
		return int(res.HitPages)
	}
	m := wire.PrepareStore{ID: a.worker.NextID(), FirstPage: uint32(first), Every: 1,
		Hashes: pages[32*first:]}
	if first > 0 {
		m.Prev = pages[32*(first-1) : 32*first]
	}
	var g wire.StoreGrant
	if err := a.worker.Call(&m, &g, patience); err != nil {
		a.t.Fatal(err)
	}
	if g.Store != 0 {
		if err := a.worker.Send(&wire.CommitStore{Store: g.Store}); err != nil {
			a.t.Fatal(err)
		}
	}
	// The commit is done before the next lookup.
	ping := wire.Ping{ID: a.worker.NextID()}
	if err := a.worker.Call(&ping, new(wire.Pong), patience); err != nil {
		a.t.Fatal(err)
	}
	return int(res.HitPages)
}

// TestRecordAndSimulate records what a client asks a sidecar for, ends it by Ctrl-C, and replays
// it: the simulation of the arena's own size hits what the sidecar counted. The sidecar's own curve
// says the same.
func TestRecordAndSimulate(t *testing.T) {
	t.Parallel()
	s := serveProcess(t, "--sessions-share=1")
	file := filepath.Join(t.TempDir(), "requests.lkt")
	record := startRecord(t, s.dir, "--json", file)
	a := s.asker()
	r := rand.New(rand.NewPCG(1, 2))
	prompt := func(id, pages int) (b []byte) {
		for i := range pages {
			d := prefixes.Digest(id, i)
			b = append(b, d[:]...)
		}
		return b
	}
	// Conversations that grow by some pages each time, about twice as large as the arena together.
	const requests = 600
	grown := map[int]int{}
	asked, found := 0, 0
	for range requests {
		id := min(r.IntN(120), r.IntN(120))
		if grown[id] += 1 + r.IntN(12); grown[id] > 90 {
			grown[id] = 5
		}
		asked += grown[id]
		found += a.ask(prompt(id, grown[id]))
	}
	if err := record.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := record.wait(); err != nil {
		t.Fatal(err)
	}
	var sum recordSummary
	if err := json.Unmarshal(record.stdout.Bytes(), &sum); err != nil {
		t.Fatal(err, record.stdout.String())
	}
	if sum.Lookups != requests || sum.Pages != asked || sum.Held != found || sum.Stores == 0 ||
		sum.Dropped != 0 || sum.Bytes == 0 {
		t.Errorf("%+v, want %d lookups of %d pages, %d found", sum, requests, asked, found)
	}
	c := commander{t, s.dir}
	var st admin.Status
	c.says([]string{"status", "--json"}, &st)
	if st.Counters.LookupPages != uint64(asked) || st.Counters.HitPages != uint64(found) ||
		st.Evictions["room"] == 0 {
		t.Errorf("the sidecar counted %d of %d pages, and %d evictions", st.Counters.HitPages,
			st.Counters.LookupPages, st.Evictions["room"])
	}
	want := float64(found) / float64(asked)
	var report simulate.Report
	c.says([]string{"simulate", file, "--format=json", "--memory=8M,64M", "--tier=0,64M"}, &report)
	if len(report.Results) != 4 || report.Traces[0].Recorded.HeldPages != found {
		t.Fatalf("%+v", report)
	}
	ceiling := report.Traces[0].Ceiling
	for i, want := range []float64{want, ceiling, ceiling, ceiling} {
		if got := report.Results[i].Ratio; math.Abs(got-want) > 0.01 {
			t.Errorf("%+v: %.4f, want %.4f", report.Results[i], got, want)
		}
	}
	if want < 0.3 || want > ceiling-0.05 || report.Results[0].MemoryBytes != 8<<20 ||
		report.Results[2].TierBytes != 64<<20 {
		t.Errorf("%.4f were found, %.4f could be: %+v", want, ceiling, report.Results)
	}
	if n := len(st.Demand.Curve); n != 6 || st.Demand.AskedPages != uint64(asked) ||
		math.Abs(st.Demand.Curve[2].HitRatio-want) > 0.01 || st.Demand.ReuseBytes == 0 ||
		math.Abs(st.Demand.Measured-want) > 0.01 || st.Demand.ResidenceS == 0 {
		t.Errorf("%+v, want %.4f", st.Demand, want)
	}
	c.says([]string{"status"}, nil, "other sizes", "twice", "HIT RATIO", "× 8")
	c.says([]string{"simulate", file}, nil, "600 lookups", "no tier", "tier of 32M", "adaptive")

	c.fails([]string{"record", file}, "is there already", "--replace")
	c.fails([]string{"record", file, "--size=0"}, "--size 0: want a size")
	c.fails([]string{"record", filepath.Join(t.TempDir(), "no", "file")}, "no such file")
	c.fails([]string{"simulate", file, "--memory=none"}, "--memory none: want a size")
	c.fails([]string{"simulate", file, "--admit=some"}, "--admit some: want one of stored, evicted, learned")
	nowhere := commander{t, t.TempDir()}
	gone := filepath.Join(t.TempDir(), "file")
	nowhere.fails([]string{"record", gone}, "no sidecar runs")
	if _, err := os.Stat(gone); !os.IsNotExist(err) {
		t.Error("a recording of nothing is there:", err)
	}
}

// TestRecordEnds in time, at its size and with its sidecar, and what is there can be read.
func TestRecordEnds(t *testing.T) {
	t.Parallel()
	s := serveProcess(t)
	a := s.asker()
	packed, _ := hashes(8)
	dir := t.TempDir()
	for name, args := range map[string][]string{"size": {"--size=1"}, "time": {"--for=1s"}} {
		file := filepath.Join(dir, name)
		r := startRecord(t, s.dir, append(args, file)...)
		a.ask(packed)
		if err := r.wait(); err != nil || !strings.Contains(r.stdout.String(), "1 lookups of 8 pages") {
			t.Errorf("%s: %v, %s", name, err, r.stdout.String())
		}
	}
	file := filepath.Join(dir, "sidecar")
	r := startRecord(t, s.dir, file)
	a.ask(packed)
	if err := s.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := r.wait(); err == nil {
		t.Error("a recording that lacks its end is a success")
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}

// TestRecordInParts begins a new file by size and by time, keeps the newest, and goes on with the
// numbers. All files of a recording together are what one file would be.
func TestRecordInParts(t *testing.T) {
	t.Parallel()
	s := serveProcess(t)
	a := s.asker()
	c := commander{t, s.dir}
	for name, flag := range map[string]string{"size": "--rotate-size=1", "time": "--rotate-every=1s"} {
		file := filepath.Join(t.TempDir(), name+".lkt")
		whole := startRecord(t, s.dir, "--json", file+".whole")
		parts := startRecord(t, s.dir, "--json", flag, file)
		// The first request after each second begins a file.
		for n := 0; len(numbered(file)) < 3; n++ {
			packed, _ := hashes(8 + n%8)
			a.ask(packed)
			time.Sleep(10 * time.Millisecond)
		}
		var one, several recordSummary
		for _, r := range []*recordProcess{whole, parts} {
			if err := r.cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			if err := r.wait(); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(json.Unmarshal(whole.stdout.Bytes(), &one),
			json.Unmarshal(parts.stdout.Bytes(), &several)); err != nil {
			t.Fatal(err)
		}
		if several.Lookups != one.Lookups || several.Stores != one.Stores ||
			several.Pages != one.Pages || len(several.Files) != 3 ||
			several.Files[0] != partName(file, 1) {
			t.Errorf("%s: %+v, want %+v", name, several, one)
		}
		var single, joined, last simulate.Report
		sizes := []string{"--format=json", "--memory=8M", "--tier=0"}
		c.says(append([]string{"simulate", file + ".whole"}, sizes...), &single)
		backwards := slices.Clone(several.Files)
		slices.Reverse(backwards)
		c.says(append(append([]string{"simulate"}, backwards...), sizes...), &joined)
		if len(joined.Traces) != 1 || joined.Results[0].Ratio != single.Results[0].Ratio ||
			joined.Traces[0].Recorded.Lookups != one.Lookups || joined.Traces[0].Recorded.Cut {
			t.Errorf("%s: %+v, want %+v", name, joined, single)
		}
		// Each can be read alone, but not with one between missing.
		c.says(append([]string{"simulate", several.Files[2]}, sizes...), &last)
		c.fails([]string{"simulate", several.Files[0], several.Files[2]}, "parts 1 and 3")
		c.fails([]string{"simulate", several.Files[0], several.Files[0]}, "parts 1 and 1")

		again := startRecord(t, s.dir, "--json", flag, "--keep=2", file)
		packed, _ := hashes(8)
		a.ask(packed)
		if err := again.cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		if err := again.wait(); err != nil {
			t.Fatal(err)
		}
		if got := numbered(file); !slices.Equal(got, []int{3, 4}) {
			t.Errorf("%s: files %d are kept", name, got)
		}
		// Files of two recordings are two traces.
		var two simulate.Report
		c.says(append([]string{"simulate", partName(file, 3), partName(file, 4)}, sizes...), &two)
		if len(two.Traces) != 2 {
			t.Errorf("%s: %+v", name, two.Traces)
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	c.fails([]string{"record", file, "--rotate-size=none"}, "--rotate-size none: want a size")
	c.fails([]string{"record", file, "--keep=2"}, "with --rotate-size or --rotate-every")
	c.fails([]string{"record", file, "--rotate-every=1h", "--replace"}, "numbered on")
	c.fails([]string{"record", file, "--rotate-every=-1h"}, "want a time")
}
