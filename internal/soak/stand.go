package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A stand is a directory with the processes of one run, and the problems found with them.
type stand struct {
	name  string // name of the program in its output
	dir   string // for all files of the run
	bin   string // the binary under test
	start time.Time
	http  *http.Client

	mu       sync.Mutex
	problems []string // guarded by mu
}

func newStand(name, dir, bin string) stand {
	return stand{name: name, dir: dir, bin: bin, start: time.Now(),
		http: &http.Client{Timeout: 5 * time.Second}}
}

// process is a child. It is a problem if the run did not end it.
type process struct {
	name    string
	cmd     *exec.Cmd
	stdin   io.Closer
	ended   chan struct{} // closed after it was waited for
	wanted  atomic.Bool   // the run ends it, or has another process do so
	stopped bool
}

func (p *process) dead() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// end sends a signal, unless the process has ended, and waits. A process that does not end in time
// is killed, which is a problem.
func (s *stand) end(p *process, sig os.Signal, patience time.Duration) {
	if p == nil {
		return
	}
	p.wanted.Store(true)
	_ = p.cmd.Process.Signal(sig)
	if p.stopped {
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
	}
	select {
	case <-p.ended:
	case <-time.After(patience):
		s.problem("%s has not ended %v after %v", p.name, patience, sig)
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// spawn starts a child in a process group of its own, so that Ctrl-C reaches only this program.
// each is called for each line of its output.
func (s *stand) spawn(name string, each func(line []byte), program string,
	args ...string) (*process, error) {
	p := &process{name: name, cmd: exec.Command(program, args...), ended: make(chan struct{})}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	log, err := os.OpenFile(filepath.Join(s.dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY,
		0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p.cmd.Stderr = log
	var lines io.Reader
	if each != nil {
		if lines, err = p.cmd.StdoutPipe(); err != nil {
			return nil, err
		}
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.ended)
		if each != nil {
			for scan := bufio.NewScanner(lines); scan.Scan(); {
				each(scan.Bytes())
			}
		}
		if err := p.cmd.Wait(); !p.wanted.Load() {
			s.problem("%s ended by itself: %v\n%s", name, err, tail(log.Name(), 4000))
		}
	}()
	return p, nil
}

// waitServing waits until the admin server of the sidecar at an endpoint reports the process's pid.
func (s *stand) waitServing(endpoint string, p *process) (err error) {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(
		20 * time.Millisecond) {
		var st status
		if err = s.get(endpoint, "/v1/status", &st); err == nil && st.PID == p.cmd.Process.Pid {
			return nil
		}
		if p.dead() {
			break
		}
	}
	return fmt.Errorf("%s does not serve: %w\n%s", p.name, err,
		tail(filepath.Join(s.dir, p.name+".log"), 4000))
}

func (s *stand) problem(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := fmt.Sprintf(format, args...)
	if len(s.problems) < 50 {
		s.problems = append(s.problems, text)
	}
	fmt.Fprintf(os.Stderr, "%s: %7.1fs PROBLEM: %s\n", s.name, time.Since(s.start).Seconds(), text)
}

func (s *stand) get(endpoint, path string, into any) error {
	return s.ask(endpoint, http.MethodGet, path, nil, into)
}

// ask sends a request to the admin server of the sidecar at an endpoint. A refusal is an error; a
// failure of the server is a problem.
func (s *stand) ask(endpoint, method, path string, body, into any) error {
	addr, err := os.ReadFile(filepath.Join(endpoint, "admin.addr"))
	if err != nil {
		return err
	}
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	q, err := http.NewRequest(method, "http://"+strings.TrimSpace(string(addr))+path,
		bytes.NewReader(b))
	if err != nil {
		return err
	}
	q.Header.Set("Content-Type", "application/json")
	r, err := s.http.Do(q)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if b, err = io.ReadAll(io.LimitReader(r.Body, 16<<20)); err != nil {
		return err
	}
	if r.StatusCode == http.StatusInternalServerError {
		s.problem("%s %s: %s", method, path, b)
	}
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", path, r.Status, b)
	}
	return json.Unmarshal(b, into)
}

// readLogs looks for lines that no process may ever log. Binaries built with the race detector
// report races there.
func (s *stand) readLogs(names ...string) {
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(s.dir, name+".log"))
		if err != nil {
			s.problem("%v", err)
			continue
		}
		for _, never := range []string{"WARNING: DATA RACE", "panic: ", "fatal error: ", "DPANIC"} {
			if at := strings.Index(string(b), never); at >= 0 {
				s.problem("in %s.log: %s", name, b[at:min(at+4000, len(b))])
			}
		}
	}
}

// tail returns the last bytes of a file, for a report.
func tail(name string, n int64) string {
	f, err := os.Open(name)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > n {
		_, _ = f.Seek(-n, io.SeekEnd)
	}
	b, _ := io.ReadAll(f)
	return string(b)
}

// copyLimited copies at most n bytes.
func copyLimited(to io.Writer, from io.Reader, n int64) (int64, error) {
	return io.Copy(to, io.LimitReader(from, n))
}
