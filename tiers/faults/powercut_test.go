package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/daxtier"
	"lookaside/tiers/slab"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs"
)

// Fault 25: the file system stops at once, its journal and what was not synced as a power cut
// leaves them. The process that stores is stopped just before, so that it does nothing with what it
// is answered after the cut, and killed after it.

// cutEnv makes this binary the process that stores, with a cuts in JSON.
const cutEnv = "FAULTS_TEST_CUT"

// cuts are power cuts while chunks are stored in a tier, or after that.
type cuts struct {
	Name                 string
	Path                 string // of the tier
	Pool, Buffered       bool
	SizeBytes, SlabBytes int64
	Workers, Each        int // which store so many chunks each
	// after the first store, at which the power is cut; 0: after the last
	Most   time.Duration
	Rounds int
	First  int // number of the first chunk
}

func TestPowerCut(t *testing.T) {
	need(t, "losetup", "mkfs.ext4")
	device, _ := loop(t, t.TempDir(), 112<<20)
	m := mount(t, device, "ext4", "")
	t.Logf("seed %d", *seedFlag)
	for _, c := range []cuts{
		// Into many slabs, while they are carved.
		{Name: "disk", SizeBytes: 32 << 20, SlabBytes: 4 << 20, Workers: 4, Each: 24,
			Most: 60 * time.Millisecond, Rounds: 2},
		{Name: "buffered", Buffered: true, SizeBytes: 32 << 20, SlabBytes: 4 << 20, Workers: 4,
			Each: 24, Most: 60 * time.Millisecond, Rounds: 2},
		{Name: "pool", Pool: true, SizeBytes: 48 << 20, SlabBytes: 4 << 20, Workers: 8, Each: 16,
			Most: 50 * time.Millisecond, Rounds: 3},
		// After the last of a few that go into one slab at once: no later sync makes up for what
		// one has missed. A file that stands in for a device lasts as msync makes it.
		{Name: "ended", Pool: true, SizeBytes: 32 << 20, SlabBytes: 32 << 20, Workers: 4, Each: 4,
			Rounds: 6},
	} {
		t.Run(c.Name, func(t *testing.T) {
			total := 0
			for round := range c.Rounds * *roundsFlag {
				c.Path, c.First = filepath.Join(m.dir, c.Name), round<<16
				total += c.cut(t, m, rand.New(rand.NewPCG(*seedFlag, uint64(round))))
			}
			ok(t, os.RemoveAll(c.Path))
			t.Logf("%d chunks were acknowledged before a cut", total)
		})
	}
}

func (c *cuts) open() (tiers.Tier, error) {
	if c.Pool {
		o := poolOptions("", c.SizeBytes)
		o.Devices[0].Path, o.SlabBytes = c.Path, c.SlabBytes
		return daxtier.Open(o)
	}
	o := options(c.Path, c.SizeBytes)
	o.SlabBytes = c.SlabBytes
	if c.Buffered {
		o.Direct = slab.DirectNever
	}
	return slab.Open(o)
}

// storeUntilCut is the process that stores. It says the number of each chunk that was acknowledged,
// and in the end "end".
func storeUntilCut(spec string) error {
	var c cuts
	if err := json.Unmarshal([]byte(spec), &c); err != nil {
		return err
	}
	tier, err := c.open()
	if err != nil {
		return err
	}
	var running sync.WaitGroup
	for w := range c.Workers {
		running.Go(func() {
			for n := c.first(w); n < c.first(w)+c.Each; n++ {
				run := chunk(n)
				tr := tiers.Transfer{Run: run,
					Bytes: make([]byte, int64(run.Pages())*space.Geometry.PageBytes)}
				tiertest.FillRun(tr.Bytes, run)
				tier.Store(context.Background(), []tiers.Transfer{tr}, func(_ int, err error) {
					if err == nil {
						fmt.Println(n) // one write
					} else {
						fmt.Println("WRONG:", err)
					}
				})
			}
		})
	}
	running.Wait()
	if st := tier.Stats(); st.Evictions > 0 {
		fmt.Printf("WRONG: %d chunks were evicted, though there is room for all\n", st.Evictions)
	}
	fmt.Println("end")
	select {}
}

func (c *cuts) first(w int) int { return c.First + w<<12 }

// cut cuts the power once, and answers how many chunks had been acknowledged.
func (c *cuts) cut(t *testing.T, m *mounted, rnd *rand.Rand) (acknowledged int) {
	self, err := os.Executable()
	ok(t, err)
	spec, err := json.Marshal(c)
	ok(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), cutEnv+"="+string(spec))
	out, err := cmd.StdoutPipe()
	ok(t, err)
	cmd.Stderr = os.Stderr
	ok(t, cmd.Start())
	said := make(chan string, c.Workers*c.Each+10)
	go func() {
		defer close(said)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			said <- lines.Text()
		}
	}()
	var before []int
	hear := func(line string) (ended bool) {
		n, err := strconv.Atoi(line)
		switch {
		case err == nil:
			before = append(before, n)
		case line != "end":
			t.Error(line)
		}
		return line == "end"
	}
	for ended := false; !ended && (len(before) == 0 || c.Most == 0); {
		line, there := <-said
		if !there {
			t.Fatal("the process that stores has ended")
		}
		ended = hear(line)
	}
	if c.Most > 0 {
		time.Sleep(time.Duration(rnd.Int64N(int64(c.Most))))
	}
	stop(t, cmd.Process)
	powerCut(t, m)
	ok(t, cmd.Process.Kill())
	for line := range said { // what it said before it was stopped
		hear(line)
	}
	_ = cmd.Wait()
	m.unmount()
	m.remount()
	if c.Most == 0 && len(before) != c.Workers*c.Each {
		t.Errorf("%d of %d chunks were stored", len(before), c.Workers*c.Each)
	}
	tier, err := c.open()
	ok(t, err)
	var lost []int
	for _, n := range before {
		if loaded(t, tier, n, n+1)[0] != nil {
			lost = append(lost, n-c.First)
		}
	}
	if len(lost) > 0 {
		t.Errorf("round %d: of %d chunks that were acknowledged before the power cut %v are lost; %+v", c.First>>16, len(before), lost, tier.Stats())
	}
	for w := range c.Workers { // the others are right or gone
		for i, err := range loaded(t, tier, c.first(w), c.first(w)+c.Each) {
			if err != nil && !isMissing(err) && !isCorrupt(err) {
				t.Errorf("chunk %d: %v", c.first(w)+i, err)
			}
		}
	}
	if _, err := tier.Clear(t.Context(), space.Fingerprint); err != nil {
		t.Error(err)
	}
	ok(t, tier.Close())
	if c.Pool {
		o := poolOptions("", 0)
		o.Devices[0].Path = c.Path
		checkPool(t, o)
	} else {
		checkClean(t, vfs.OS, c.Path)
	}
	return len(before)
}

// stop stops a process, and returns when all its threads have: those that are in the kernel come to
// an end there first.
func stop(t *testing.T, p *os.Process) {
	t.Helper()
	ok(t, p.Signal(syscall.SIGSTOP))
	wait(t, "the process is stopped", func() bool {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.Pid))
		for _, name := range tasks {
			b, err := os.ReadFile(name)
			if err != nil { // the thread has ended
				continue
			}
			_, rest, _ := strings.Cut(string(b), ") ")
			if rest == "" || !strings.Contains("TtZX", rest[:1]) {
				return false
			}
		}
		return len(tasks) > 0
	})
}
