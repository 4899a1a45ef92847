// Package elsewheretest has a program that keeps values for a tier, as a process of its own, and
// that misbehaves on demand. It is the test binary itself, started again.
package elsewheretest

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc/wire"
)

// argument is the first argument of a test binary that is to be the program.
const argument = "elsewheretest-program"

// Faults of a program. Each is for the calls that come while it is set (Store.Set).
const (
	Hang      = "hang"      // gets and puts are not reported, cancelled or not
	Stall     = "stall"     // gets and puts wait until the fault is over, or they are cancelled
	Garbage   = "garbage"   // a get is answered by bytes that are no message
	Wrong     = "wrong"     // gets fill the memory with other bytes, and say OK
	Nothing   = "nothing"   // gets fill nothing, and say OK
	Late      = "late"      // gets write only when they are cancelled, report it, and say so
	Die       = "die"       // the process kills itself when a get comes
	DieInPut  = "die-put"   // likewise for a put, with half of the value written
	Twice     = "twice"     // each result is sent twice
	Stranger  = "stranger"  // results of a call that was never made
	Beyond    = "beyond"    // results of items that a call does not have
	Full      = "full"      // puts find no room
	Failing   = "failing"   // all calls fail
	Mute      = "mute"      // figures are not sent
	DropHolds = "holds"     // the descriptors of TierHello are closed at the next call
	Unmapped  = "unmapped"  // regions are refused
	Refuse    = "refuse"    // the program refuses to serve
	Flood     = "flood"     // a message longer than allowed
	Leave     = "leave"     // the connection is closed at the next get
	LateWrite = "latewrite" // likewise, 20 ms after they are cancelled
)

// Config is what the program is started with.
type Config struct {
	Dir           string // where values and the fault are
	CapacityBytes int64  // 0: without a limit
	Listen        string // path of the socket to listen on; empty: that of the sidecar
	MaxItems      uint32
	MaxCalls      uint32
	Version       uint16 // of the protocol; 0: the right one
	FailNth       int64  // the operation that fails, over all runs in Dir; 0: none
}

// Main is called first by TestMain. It does not return if this process is to be a program.
func Main() {
	if len(os.Args) != 3 || os.Args[1] != argument {
		return
	}
	var c Config
	if err := json.Unmarshal([]byte(os.Args[2]), &c); err != nil {
		panic(err)
	}
	code := uintptr(0)
	if err := run(c); err != nil {
		fmt.Fprintln(os.Stderr, "elsewheretest:", err)
		code = 1
	}
	// os.Exit would sleep a second under the race detector.
	_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, code, 0, 0)
}

// Store is the medium of a program.
type Store struct{ Config }

// New returns an empty store.
func New(t testing.TB) *Store {
	return &Store{Config{Dir: t.TempDir(), MaxItems: 64, MaxCalls: 8}}
}

// Command returns the command that starts the program.
func (s *Store) Command() []string {
	b, err := json.Marshal(s.Config)
	if err != nil {
		panic(err)
	}
	return []string{os.Args[0], argument, string(b)}
}

// Set sets a fault; "" ends it.
func (s *Store) Set(fault string) {
	name := filepath.Join(s.Dir, "fault")
	if err := os.WriteFile(name+".new", []byte(fault), 0o600); err != nil {
		panic(err)
	}
	if err := os.Rename(name+".new", name); err != nil {
		panic(err)
	}
}

// Failed reports whether the operation of FailNth has come.
func (s *Store) Failed() bool { return exists(filepath.Join(s.Dir, "failed")) }

// Values returns the names of all values.
func (s *Store) Values() []string {
	names, err := filepath.Glob(filepath.Join(s.Dir, "v-*"))
	if err != nil {
		panic(err)
	}
	return names
}

// Rot changes all bytes behind the first 4,096 of each value that has more.
func (s *Store) Rot() {
	for _, name := range s.Values() {
		b, err := os.ReadFile(name)
		if err != nil {
			panic(err)
		}
		for i := 4096; i < len(b); i++ {
			b[i] ^= 0x40
		}
		if err := os.WriteFile(name, b, 0o600); err != nil {
			panic(err)
		}
	}
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

// server is a connection of the program's.
type server struct {
	*Config
	sock    int
	holds   []int
	mu      sync.Mutex // guards what follows, and the order of sends
	regions map[uint32]*dax.Attached
	cancels map[uint64]chan struct{}
	running sync.WaitGroup
}

func run(c Config) error {
	if c.Listen == "" {
		fd, err := strconv.Atoi(os.Getenv("LOOKASIDE_TIER_FD"))
		if err != nil {
			return err
		}
		unix.CloseOnExec(fd)
		return serve(&c, fd)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: c.Listen, Net: "unixpacket"})
	if err != nil {
		return err
	}
	for {
		uc, err := l.AcceptUnix()
		if err != nil {
			return err
		}
		f, err := uc.File()
		if err = errors.Join(err, uc.Close()); err != nil {
			return err
		}
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		f.Close()
		if err != nil {
			return err
		}
		if err := unix.SetNonblock(fd, false); err != nil {
			return err
		}
		go func() {
			if err := serve(&c, fd); err != nil {
				fmt.Fprintln(os.Stderr, "elsewheretest:", err)
			}
		}()
	}
}

func serve(c *Config, sock int) error {
	s := &server{Config: c, sock: sock, regions: map[uint32]*dax.Attached{},
		cancels: map[uint64]chan struct{}{}}
	defer s.close()
	_ = unix.SetsockoptInt(sock, unix.SOL_SOCKET, unix.SO_SNDBUF, wire.SocketBufferBytes)
	buf, oob := make([]byte, wire.MaxPacketBytes+1), make([]byte, unix.CmsgSpace(64))
	for {
		n, oobn, _, _, err := unix.Recvmsg(sock, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return err
		}
		var fds []int
		if msgs, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(msgs) > 0 {
			fds, _ = unix.ParseUnixRights(&msgs[0])
		}
		if err := s.handle(bytes.Clone(buf[:n]), fds); err != nil {
			return err
		}
	}
}

// close is the end of a connection: calls are cancelled and waited for before the memory goes.
func (s *server) close() {
	s.mu.Lock()
	for _, c := range s.cancels {
		close(c)
	}
	s.cancels = nil
	s.mu.Unlock()
	s.running.Wait()
	for _, r := range s.regions {
		_ = r.Close()
	}
	for _, fd := range s.holds {
		unix.Close(fd)
	}
	unix.Close(s.sock)
}

func (s *server) fault() string {
	b, _ := os.ReadFile(filepath.Join(s.Dir, "fault"))
	return string(b)
}

// sendRaw sends a packet. It fails if the sidecar has left.
func (s *server) sendRaw(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = unix.Sendto(s.sock, b, unix.MSG_NOSIGNAL, nil)
}

func (s *server) send(m wire.Message) { s.sendRaw(m.Append(nil)) }

func (s *server) handle(b []byte, fds []int) error {
	t, err := wire.Peek(b)
	if err != nil {
		return err
	}
	m := wire.New(t)
	if err := m.Decode(b, &wire.DefaultLimits); err != nil {
		return err
	}
	switch m := m.(type) {
	case *wire.TierHello:
		s.holds = fds
		if s.fault() == Refuse {
			s.send(&wire.TierRefuse{Message: "it was told to"})
			return nil
		}
		s.send(&wire.TierWelcome{Version: s.Version, Program: "elsewheretest",
			MaxItems: s.MaxItems, MaxCalls: s.MaxCalls})
	case *wire.TierRegion:
		return s.attach(m, fds[0])
	case *wire.TierRegionGone:
		s.mu.Lock()
		r := s.regions[m.Region]
		delete(s.regions, m.Region)
		s.mu.Unlock()
		if r != nil {
			_ = r.Close()
		}
		s.send(&wire.TierRegionLeft{Region: m.Region})
	case *wire.TierCancel:
		s.mu.Lock()
		if c, ok := s.cancels[m.ID]; ok {
			close(c)
			delete(s.cancels, m.ID)
		}
		s.mu.Unlock()
	case *wire.TierPut:
		s.begin(m.ID, func(c <-chan struct{}) { s.put(m, c) })
	case *wire.TierGet:
		s.begin(m.ID, func(c <-chan struct{}) { s.get(m, c) })
	default:
		s.running.Go(func() { s.answer(m) })
	}
	return nil
}

func (s *server) begin(id uint64, do func(cancelled <-chan struct{})) {
	c := make(chan struct{})
	s.mu.Lock()
	s.cancels[id] = c
	s.mu.Unlock()
	s.running.Go(func() {
		do(c)
		s.mu.Lock()
		delete(s.cancels, id)
		s.mu.Unlock()
	})
}

func (s *server) attach(m *wire.TierRegion, fd int) error {
	// Scratch memory is needed in any case.
	if s.fault() == Unmapped && m.Region < 3<<30 {
		unix.Close(fd)
		s.send(&wire.TierRegionReady{Region: m.Region, Error: "it was told to"})
		return nil
	}
	f := os.NewFile(uintptr(fd), "region")
	r, err := dax.Attach(f, int64(m.Offset), int64(m.SizeBytes), int64(m.PageSize))
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	s.mu.Lock()
	s.regions[m.Region] = r
	s.mu.Unlock()
	s.send(&wire.TierRegionReady{Region: m.Region})
	return nil
}

// answer handles a call without memory.
func (s *server) answer(m wire.Message) {
	fault := s.fault()
	fails := s.failing(fault)
	switch m := m.(type) {
	case *wire.TierContains:
		s.done(m.ID, len(m.Keys), func(i int) uint8 {
			switch {
			case fails:
				return wire.TierFailed
			case exists(s.path(m.Keys[i])):
				return wire.TierOK
			}
			return wire.TierMissing
		})
	case *wire.TierDrop:
		s.done(m.ID, len(m.Keys), func(i int) uint8 {
			if fails {
				return wire.TierFailed
			}
			_ = os.Remove(s.path(m.Keys[i]))
			return wire.TierOK
		})
	case *wire.TierClear:
		if fails {
			s.send(&wire.TierCleared{ID: m.ID, Error: "it was told to"})
			return
		}
		names, _ := filepath.Glob(filepath.Join(s.Dir, "v-"+hex.EncodeToString(m.Prefix)+"*"))
		for _, name := range names {
			_ = os.Remove(name)
		}
		s.send(&wire.TierCleared{ID: m.ID, Keys: uint64(len(names))})
	case *wire.TierStats:
		if fault == Mute {
			return
		}
		used, keys := s.used()
		evicted, _ := os.ReadFile(filepath.Join(s.Dir, "evicted"))
		s.send(&wire.TierFigures{ID: m.ID, CapacityBytes: uint64(s.CapacityBytes),
			UsedBytes: uint64(used), Keys: uint64(keys), Evictions: uint64(len(evicted)),
			Detail: s.Dir})
	}
}

// failing counts an operation, and reports whether it is to fail.
func (s *server) failing(fault string) bool {
	if s.FailNth == 0 {
		return fault == Failing
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	name := filepath.Join(s.Dir, "operations")
	b, _ := os.ReadFile(name)
	if int64(len(b))+1 != s.FailNth {
		_ = os.WriteFile(name, append(b, '.'), 0o600)
		return false
	}
	_ = os.WriteFile(name, append(b, '!'), 0o600)
	_ = os.WriteFile(filepath.Join(s.Dir, "failed"), nil, 0o600)
	return true
}

func (s *server) done(id uint64, n int, status func(i int) uint8) {
	m := wire.TierDone{ID: id}
	for i := range n {
		m.Results = append(m.Results, wire.TierResult{Index: uint32(i), Status: status(i)})
		if m.Results[i].Status == wire.TierFailed {
			m.Text = "it was told to"
		}
	}
	s.send(&m)
}

func (s *server) path(key []byte) string {
	return filepath.Join(s.Dir, "v-"+hex.EncodeToString(key))
}

func (s *server) used() (bytes int64, keys int) {
	names, _ := filepath.Glob(filepath.Join(s.Dir, "v-*"))
	for _, name := range names {
		if st, err := os.Stat(name); err == nil {
			bytes, keys = bytes+st.Size(), keys+1
		}
	}
	return bytes, keys
}

// memory returns the memory of an item.
func (s *server) memory(item *wire.TierItem) (mem [][]byte, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range item.Pieces {
		b := s.regions[p.Region].Bytes()[p.Offset : p.Offset+p.SizeBytes]
		mem, size = append(mem, b), size+int64(len(b))
	}
	return mem, size
}

// awaits does what a fault has calls with memory wait for. report is false if the call is not to be
// reported, cancel is true if it was cancelled.
func (s *server) awaits(fault string, cancelled <-chan struct{}) (report, cancel bool) {
	switch fault {
	case Hang:
		for s.fault() == Hang { // even a lost connection does not end it
			time.Sleep(time.Millisecond)
		}
		return false, false
	case Stall:
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for s.fault() == Stall {
			select {
			case <-cancelled:
				return true, true
			case <-tick.C:
			}
		}
	case DropHolds:
		for _, fd := range s.holds {
			unix.Close(fd)
		}
		s.holds = nil
		return false, false
	}
	return true, false
}

func (s *server) put(m *wire.TierPut, cancelled <-chan struct{}) {
	fault := s.fault()
	report, cancel := s.awaits(fault, cancelled)
	if !report {
		return
	}
	s.report(fault, m.ID, len(m.Items), func(i int) uint8 {
		select {
		case <-cancelled:
			cancel = true
		default:
		}
		switch {
		case cancel:
			return wire.TierCancelled
		case s.failing(fault):
			return wire.TierFailed
		case fault == Full:
			return wire.TierNoRoom
		}
		mem, size := s.memory(&m.Items[i])
		if fault == DieInPut {
			_ = os.WriteFile(s.path(m.Items[i].Key)+".new", mem[0][:len(mem[0])/2], 0o600)
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
		if !s.room(size) {
			return wire.TierNoRoom
		}
		f, err := os.CreateTemp(s.Dir, "new-*")
		if err != nil {
			return wire.TierFailed
		}
		for _, b := range mem {
			if _, werr := f.Write(b); werr != nil {
				err = werr
			}
		}
		if err = errors.Join(err, f.Close()); err == nil {
			err = os.Rename(f.Name(), s.path(m.Items[i].Key))
		}
		if err != nil {
			_ = os.Remove(f.Name())
			return wire.TierFailed
		}
		return wire.TierOK
	})
}

// room makes room for a value, by dropping the oldest.
func (s *server) room(size int64) bool {
	if s.CapacityBytes == 0 {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		used, _ := s.used()
		if used+size <= s.CapacityBytes {
			return true
		}
		var oldest string
		var since time.Time
		names, _ := filepath.Glob(filepath.Join(s.Dir, "v-*"))
		for _, name := range names {
			if st, err := os.Stat(name); err == nil && (oldest == "" ||
				st.ModTime().Before(since)) {
				oldest, since = name, st.ModTime()
			}
		}
		if oldest == "" {
			return false
		}
		_ = os.Remove(oldest)
		f, err := os.OpenFile(filepath.Join(s.Dir, "evicted"),
			os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			_, _ = f.WriteString(".")
			f.Close()
		}
	}
}

func (s *server) get(m *wire.TierGet, cancelled <-chan struct{}) {
	fault := s.fault()
	switch fault {
	case Die:
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	case Garbage:
		s.sendRaw([]byte("\x80\x04\x95garbage"))
		return
	case Flood:
		s.sendRaw(make([]byte, wire.MaxPacketBytes+1))
		return
	case Leave:
		_ = unix.Shutdown(s.sock, unix.SHUT_RDWR)
		return
	case Stranger:
		s.done(m.ID+1000, 1, func(int) uint8 { return wire.TierOK })
		return
	case Beyond:
		s.done(m.ID, len(m.Items)+1, func(int) uint8 { return wire.TierOK })
		return
	case Late, LateWrite:
		<-cancelled
		if fault == LateWrite {
			time.Sleep(20 * time.Millisecond)
		}
	}
	report, cancel := s.awaits(fault, cancelled)
	if !report {
		return
	}
	s.report(fault, m.ID, len(m.Items), func(i int) uint8 {
		select {
		case <-cancelled:
			cancel = cancel || fault != Late && fault != LateWrite
		default:
		}
		switch {
		case cancel:
			return wire.TierCancelled
		case s.failing(fault):
			return wire.TierFailed
		}
		mem, size := s.memory(&m.Items[i])
		value, err := os.ReadFile(s.path(m.Items[i].Key))
		switch {
		case errors.Is(err, os.ErrNotExist):
			return wire.TierMissing
		case err != nil || int64(len(value)) < size:
			return wire.TierFailed
		case fault == Wrong:
			value = []byte(strings.Repeat("w", int(size)))
		case fault == Nothing:
			return wire.TierOK
		}
		for _, b := range mem {
			value = value[copy(b, value):]
		}
		return wire.TierOK
	})
}

// report sends the results of a call, in two parts.
func (s *server) report(fault string, id uint64, n int, status func(i int) uint8) {
	half := (n + 1) / 2
	for from := 0; from < n; from += half {
		m := wire.TierDone{ID: id}
		for i := from; i < min(n, from+half); i++ {
			st := status(i)
			m.Results = append(m.Results, wire.TierResult{Index: uint32(i), Status: st})
			if st == wire.TierFailed {
				m.Text = "it was told to"
			}
		}
		s.send(&m)
		if fault == Twice {
			s.send(&m)
		}
	}
}

// Start starts a program that listens, and returns its process, which is killed at the end of the
// test.
func Start(t testing.TB, s *Store) *os.Process {
	c := s.Command()
	cmd := exec.Command(c[0], c[1:]...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	for deadline := time.Now().Add(30 * time.Second); !exists(s.Listen); {
		if time.Now().After(deadline) {
			t.Fatal("the program does not listen")
		}
		time.Sleep(time.Millisecond)
	}
	return cmd.Process
}
