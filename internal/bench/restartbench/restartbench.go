// Package restartbench measures what clients notice of a sidecar that is killed and started again,
// and of one that hands over to another.
package restartbench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"lookaside/internal/prefixes"
	"lookaside/sidecar/admin"
)

const (
	// pageBytes keeps the arena small. The directory does not depend on it.
	pageBytes = 256
	// tokens of a chunk are 256, as by default.
	pagesPerChunk = 16
	// prefixChunks is how long the prefixes are, in chunks.
	prefixChunks = 100
	// connectPause is how long a client waits between two attempts to connect.
	connectPause = 2 * time.Millisecond
	// probeFor is how long lookups go on before and after a takeover.
	probeFor = 2 * time.Second
)

// Options selects what to measure.
type Options struct {
	Program string // the lookaside command
	Dir     string // runtime.dir is made in it
	Chunks  int    // that the arena holds; rounded up to whole prefixes
	Rounds  int
	// Takeover also measures how one sidecar takes over from another.
	Takeover bool
	Log      io.Writer // of the sidecars
}

// Figures are the measurements, one value a round unless said otherwise.
type Figures struct {
	Chunks int // that were stored; one value

	// FirstSeconds has the times from the start of a sidecar to the first reply to a lookup:
	// Empty of one that has nothing, Killed of one whose predecessor was killed. The latter is a
	// reply that finds all of a prefix.
	EmptySeconds, KilledSeconds []float64
	FoundShare                  []float64 // of the pages stored, those that hit after the kill
	MappedBytes                 []float64 // that the worker mapped anew after the kill

	// PauseSeconds has the longest times between two replies to lookups, which are asked one after
	// another: over a takeover, and in as long a time without one.
	PauseSeconds, QuietSeconds []float64
	TakeoverSeconds            []float64 // from the start of the new sidecar to the end of the old
	Missed                     int       // lookups over all takeovers that did not find all
}

// Run measures. It returns an error if a page comes back wrong.
func Run(ctx context.Context, o Options) (f Figures, err error) {
	if o.Chunks < 1 || o.Rounds < 1 {
		return f, errors.New("chunks and rounds must be positive")
	}
	dir, err := os.MkdirTemp(o.Dir, "la-restart-")
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	count := (o.Chunks + prefixChunks - 1) / prefixChunks
	f.Chunks = count * prefixChunks
	r := &rig{ctx: ctx, o: o, dir: filepath.Join(dir, "rank-0"), count: count}
	defer func() { err = errors.Join(err, r.close()) }()
	for range o.Rounds {
		if err := r.round(&f); err != nil {
			return f, err
		}
	}
	return f, nil
}

// rig is a sidecar with one engine.
type rig struct {
	ctx    context.Context
	o      Options
	dir    string
	count  int // prefixes
	server *exec.Cmd
	engine *prefixes.Prefix
}

func (r *rig) pages() int { return prefixChunks * pagesPerChunk }

// start starts a sidecar. With takeover it takes over from the one that serves.
func (r *rig) start(takeover bool) (*exec.Cmd, error) {
	limit := int64(r.count)*prefixChunks*pagesPerChunk*pageBytes*5/4 + 64<<20
	args := []string{"serve", "--runtime-dir", r.dir, "--arena-limit", fmt.Sprint(limit),
		"--arena-initial", fmt.Sprint(limit), "--sessions-share", "1", "--sessions-joint-share",
		"1", "--log-level", "warn", "--peers-enabled=false"}
	if takeover {
		args = append(args, "--takeover")
	}
	cmd := exec.Command(r.o.Program, args...)
	cmd.Stdout, cmd.Stderr = r.o.Log, r.o.Log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, cmd.Start()
}

// kill kills the sidecar, and returns when it is gone.
func (r *rig) kill() error {
	if r.server == nil {
		return nil
	}
	err := r.server.Process.Kill()
	_ = r.server.Wait()
	r.server = nil
	return err
}

func (r *rig) close() error {
	err := r.kill()
	if r.engine != nil {
		err = errors.Join(err, r.engine.Close())
		r.engine = nil
	}
	return err
}

// until calls try until it succeeds. It returns the last error when the patience is over.
func (r *rig) until(try func() error) error {
	deadline := time.Now().Add(prefixes.Patience)
	for {
		err := try()
		if err == nil || time.Now().After(deadline) || r.ctx.Err() != nil {
			return errors.Join(err, r.ctx.Err())
		}
		time.Sleep(connectPause)
	}
}

func (r *rig) round(f *Figures) (err error) {
	if err := r.fill(f); err != nil {
		return fmt.Errorf("fill: %w", err)
	}
	if err := r.killed(f); err != nil {
		return fmt.Errorf("kill and start: %w", err)
	}
	if r.o.Takeover {
		if err := r.takenOver(f); err != nil {
			return fmt.Errorf("takeover: %w", err)
		}
	}
	return r.close()
}

// fill starts a sidecar without memory to find, and stores all prefixes.
func (r *rig) fill(f *Figures) (err error) {
	if err := os.RemoveAll(r.dir); err != nil {
		return err
	}
	began := time.Now()
	if r.server, err = r.start(false); err != nil {
		return err
	}
	// As vLLM: ZMQ connects anew only some 100 ms after a sidecar has replaced another.
	shape := prefixes.Shape{PageBytes: pageBytes, PagesPerChunk: pagesPerChunk, Direct: true}
	if err := r.until(func() error {
		e, err := prefixes.Dial(r.dir, shape, 0, r.pages())
		if err == nil {
			r.engine = e
		}
		return err
	}); err != nil {
		return err
	}
	if _, err := r.engine.Find(); err != nil {
		return err
	}
	f.EmptySeconds = append(f.EmptySeconds, time.Since(began).Seconds())
	if err := r.await("the arena is being prepared",
		func(a *admin.ArenaStatus) bool { return a.State == "ready" }); err != nil {
		return err
	}
	for n := range r.count {
		err := errors.Join(r.engine.Select(n, r.pages()), r.engine.Store(), r.ctx.Err())
		if err != nil {
			return fmt.Errorf("prefix %d: %w", n, err)
		}
	}
	return r.await("chunks are not in the directory",
		func(a *admin.ArenaStatus) bool { return a.WaitingChunks == 0 })
}

// await waits until the arena's status is as wanted.
func (r *rig) await(otherwise string, wanted func(a *admin.ArenaStatus) bool) error {
	return r.until(func() error {
		st, err := admin.FetchStatus(r.ctx, r.dir)
		if err == nil && !wanted(&st.Arena) {
			err = errors.New(otherwise)
		}
		return err
	})
}

// killed kills the sidecar, starts another, and counts what it finds.
func (r *rig) killed(f *Figures) (err error) {
	mapped, _ := r.engine.Memory()
	if err := r.kill(); err != nil {
		return err
	}
	began := time.Now()
	if r.server, err = r.start(false); err != nil {
		return err
	}
	if err := r.until(func() error { return r.engine.Reconnect(r.dir) }); err != nil {
		return err
	}
	if err := r.engine.Select(0, pagesPerChunk); err != nil {
		return err
	}
	if err := r.until(func() error { _, err := r.engine.Lookup(); return err }); err != nil {
		return err
	}
	f.KilledSeconds = append(f.KilledSeconds, time.Since(began).Seconds())
	found := 0
	for n := range r.count {
		if err := r.engine.Select(n, r.pages()); err != nil {
			return err
		}
		pages, err := r.engine.Find()
		if err != nil {
			return err
		}
		if found += pages; pages == r.pages() && n%max(1, r.count/20) == 0 {
			if err := r.engine.Verify(); err != nil {
				return fmt.Errorf("prefix %d: %w", n, err)
			}
		}
	}
	f.FoundShare = append(f.FoundShare, float64(found)/float64(r.count*r.pages()))
	now, _ := r.engine.Memory()
	f.MappedBytes = append(f.MappedBytes, float64(now-mapped))
	return r.ctx.Err()
}

// takenOver asks one lookup after another while another sidecar takes over.
func (r *rig) takenOver(f *Figures) error {
	if err := r.engine.Select(0, pagesPerChunk); err != nil {
		return err
	}
	if _, err := r.engine.Lookup(); err != nil {
		return err
	}
	quiet, missed, err := r.probe(time.After(2 * probeFor))
	if err != nil {
		return err
	}
	f.QuietSeconds = append(f.QuietSeconds, quiet.Seconds())
	f.Missed += missed
	over := make(chan time.Time, 1)
	done := make(chan error, 1)
	go func() {
		time.Sleep(probeFor)
		began := time.Now()
		next, err := r.start(true)
		if err == nil {
			err = r.server.Wait() // the one before ends when it has handed over
			f.TakeoverSeconds = append(f.TakeoverSeconds, time.Since(began).Seconds())
			r.server = next
			time.Sleep(probeFor)
		}
		over <- time.Now()
		done <- err
	}()
	pause, missed, err := r.probe(over)
	f.Missed += missed
	f.PauseSeconds = append(f.PauseSeconds, pause.Seconds())
	return errors.Join(err, <-done, r.engine.Verify())
}

// probe asks one lookup after another until it is told to end. It returns the longest time between
// two replies, and how many lookups did not find all of the prefix.
func (r *rig) probe(end <-chan time.Time) (longest time.Duration, missed int, err error) {
	last := time.Now()
	for {
		select {
		case <-end:
			_, err := r.engine.Lookup()
			return longest, missed, err
		case <-r.ctx.Done():
			return longest, missed, r.ctx.Err()
		default:
		}
		pages, err := r.engine.Find()
		if err != nil {
			return longest, missed, err
		}
		if pages < r.engine.Pages() {
			missed++
		}
		now := time.Now()
		longest, last = max(longest, now.Sub(last)), now
	}
}
