package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"lookaside/dax"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
)

// Options says what to gather.
type Options struct {
	Release string          // of the command
	Config  settings.Config // what a sidecar would be started with; names the endpoint
	// Named is set if the user has named the endpoint: of the sidecars, only that one is asked.
	Named   bool
	Environ []string // of the command
	// Timeout bounds each kind of facts.
	Timeout time.Duration
	// DiskTest has the speed of disk tiers measured, with DiskTestBytes written and read.
	DiskTest bool
	// Python runs the copy check on a GPU if GPU is set. GPUTimeout bounds it.
	GPU        bool
	Python     string
	GPUArgs    []string
	GPUTimeout time.Duration
	// Root is where /proc, /sys and /dev are: "/".
	Root string
}

// Facts is all that the checks look at. It holds for the moment of [Gather].
type Facts struct {
	Release  string
	Endpoint string // the directory that the command was told, or the default one
	Named    bool   // it was told
	Default  string // the default directory
	UID      int
	XDG      string // XDG_RUNTIME_DIR, or ""
	Host     Host
	Config   settings.Config
	// Budget is why arena.limit does not fit the host now, or nil.
	Budget error
	// Directory is what is at Endpoint.
	Directory Directory
	Sidecars  []Sidecar // that were asked, by their directory
	Others    []string  // directories of further sidecars of the host, which were not asked
	Disks     []Disk
	Engines   []Process   // processes of vLLM that were told to use the connector
	Parents   map[int]int // of each process of the host, its parent
	GPU       *GPU        // nil: was not asked for
	// Late names what was not known in time.
	Late []string
}

// Directory describes an endpoint as the file system shows it.
type Directory struct {
	Exists  bool
	UID     int // the owner
	Mode    os.FileMode
	Link    bool // it is a symbolic link
	Entered error
}

// Sidecar is one sidecar of this host, or a directory of one.
type Sidecar struct {
	Endpoint string
	// Err is why it could not be asked; nil if Status is its answer.
	Err    error
	PID    int // of its lock; 0 if not known
	Status admin.Status
	Config *settings.Config
}

// Gather collects the facts. It returns within the sum of its timeouts, whatever hangs: what is not
// known by then is missing, and is named in Late.
func Gather(ctx context.Context, o Options) *Facts {
	f := &Facts{Release: o.Release, Endpoint: o.Config.Runtime.Dir, Named: o.Named,
		UID:     os.Getuid(),
		Default: settings.DefaultDir(o.Environ), Config: o.Config}
	for _, e := range o.Environ {
		if v, ok := strings.CutPrefix(e, "XDG_RUNTIME_DIR="); ok {
			f.XDG = v
		}
	}
	late := func(what string) { f.Late = append(f.Late, what) }

	within(o.Timeout, late, "the kernel's files on this host", func() func() {
		h := readHost(o.Root)
		return func() { f.Host = h }
	})
	within(o.Timeout, late, "the memory's limits", func() func() {
		var err error
		if a := &o.Config.Arena; a.Kind != settings.KindDAX {
			err = dax.CheckBudget(a.Limit, a.Kind, dax.BudgetReserve)
		}
		return func() { f.Budget = err }
	})
	within(o.Timeout, late, "the directory "+f.Endpoint, func() func() {
		d := readDirectory(f.Endpoint)
		return func() { f.Directory = d }
	})
	within(o.Timeout, late, "the processes of this host", func() func() {
		engines, parents := readProcesses(o.Root)
		return func() { f.Engines, f.Parents = engines, parents }
	})
	within(2*o.Timeout, late, "the sidecars of this host", func() func() {
		ctx, cancel := context.WithTimeout(ctx, o.Timeout)
		defer cancel()
		all, others := readSidecars(ctx, f, o.Root)
		return func() { f.Sidecars, f.Others = all, others }
	})
	f.Disks = readDisks(o, f)
	if o.GPU {
		f.GPU = runGPU(ctx, &o)
	}
	return f
}

// within calls find on another goroutine and, if it ends in time, what find returns on this one.
// Otherwise it calls late, and leaves the goroutine to itself: a file system that hangs cannot be
// interrupted.
func within(timeout time.Duration, late func(string), what string, find func() (set func())) {
	done := make(chan func(), 1)
	go func() { done <- find() }()
	t := time.NewTimer(timeout)
	defer t.Stop()
	select {
	case set := <-done:
		set()
	case <-t.C:
		late(what)
	}
}

func readDirectory(path string) (d Directory) {
	info, err := os.Lstat(path)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			d.Entered = err
		}
		return d
	}
	d.Exists, d.Mode, d.Link = true, info.Mode(), info.Mode()&os.ModeSymlink != 0
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		d.UID = int(st.Uid)
	}
	return d
}

// readSidecars asks the sidecars of the host, that at the endpoint among them. If the user has
// named the endpoint, it asks that one alone and returns the directories of the others.
func readSidecars(ctx context.Context, f *Facts, root string) ([]Sidecar, []string) {
	dirs := []string{}
	if found, err := admin.HostEndpoints(filepath.Dir(f.Endpoint)); err == nil {
		dirs = found
	}
	if f.Named {
		others := slices.DeleteFunc(dirs, func(dir string) bool {
			return dir == f.Endpoint || !listens(dir)
		})
		return []Sidecar{askSidecar(ctx, f.Endpoint, root)}, others
	}
	if !slices.Contains(dirs, f.Endpoint) {
		dirs = append(dirs, f.Endpoint)
	}
	for _, p := range f.Engines {
		if dir := p.EndpointOf(0); dir != "" && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	slices.Sort(dirs)
	all := make([]Sidecar, len(dirs))
	var wg sync.WaitGroup
	for i, dir := range dirs {
		wg.Go(func() { all[i] = askSidecar(ctx, dir, root) })
	}
	wg.Wait()
	return slices.DeleteFunc(all, func(s Sidecar) bool {
		return s.Endpoint != f.Endpoint && !s.Serves() && isAbsent(s.Err)
	}), nil
}

// listens reports whether a process takes connections at a directory that is visible here.
func listens(dir string) bool {
	conn, err := net.DialTimeout("unix", filepath.Join(dir, "admin.sock"), time.Second)
	if err == nil {
		_ = conn.Close()
	}
	return err == nil
}

// Serves reports whether the sidecar answered.
func (s *Sidecar) Serves() bool { return s.Err == nil }

// isAbsent reports whether an error says that no sidecar runs at all.
func isAbsent(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}

func askSidecar(ctx context.Context, dir, root string) Sidecar {
	s := Sidecar{Endpoint: dir}
	if b, err := os.ReadFile(filepath.Join(dir, "lock")); err == nil {
		_, _ = fmt.Sscan(string(b), &s.PID)
	}
	if s.Status, s.Err = admin.FetchStatus(ctx, dir); s.Err != nil {
		return s
	}
	s.PID = s.Status.PID
	s.Config = configOf(root, s.PID)
	return s
}

// configOf returns the settings of a sidecar's process by its command line and environment, as far
// as this user may read them and its file has not changed; else nil.
func configOf(root string, pid int) *settings.Config {
	args := readWords(filepath.Join(root, "proc", fmt.Sprint(pid), "cmdline"))
	environ := readWords(filepath.Join(root, "proc", fmt.Sprint(pid), "environ"))
	serve := slices.Index(args, "serve")
	if serve < 0 {
		return nil
	}
	fs := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	fs.ParseErrorsAllowlist.UnknownFlags = true
	settings.AddFlags(fs)
	if fs.Parse(args[serve+1:]) != nil {
		return nil
	}
	c, err := settings.Load(fs, environ)
	if err != nil {
		return nil
	}
	return &c
}

// readWords reads a file of words that end in zero bytes. It returns none if it cannot be read.
func readWords(name string) []string {
	b, err := os.ReadFile(name)
	if err != nil || len(b) == 0 {
		return nil
	}
	return strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
}
