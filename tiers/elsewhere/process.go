package elsewhere

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// fdVariable names the environment variable with the number of the program's socket.
const fdVariable = "LOOKASIDE_TIER_FD"

// maxLine is how much of a line that a program prints is logged.
const maxLine = 1000

// process is a program that was started here, with all processes of its group.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has ended, and its group with it
	how   error         // how it ended; valid once ended is closed

	mu     sync.Mutex // guards reaped
	reaped bool       // its number may be another process's
}

// start starts a program with its end of the socket. The caller keeps ownership of sock. What the
// program prints is logged line by line.
func start(command []string, sock *os.File, log *zap.Logger) (*process, error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), fdVariable+"=3")
	cmd.ExtraFiles = []*os.File{sock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// A process that leaves the group may keep the pipe.
	cmd.WaitDelay = time.Second
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Start()
	err = errors.Join(err, w.Close())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", command[0], err), r.Close())
	}
	p := &process{cmd: cmd, ended: make(chan struct{})}
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		logLines(r, log)
	}()
	go func() {
		p.wait()
		// What it printed last says why it ended. A process that has left the group may hold the
		// pipe, so closing it ends the wait.
		late := time.AfterFunc(cmd.WaitDelay, func() { _ = r.SetReadDeadline(time.Unix(1, 0)) })
		<-printed
		late.Stop()
		r.Close()
		close(p.ended)
	}()
	return p, nil
}

// wait waits for the end of the process, kills what is left of its group, and reaps it.
func (p *process) wait() {
	var info unix.Siginfo
	for {
		// It stays a zombie, so its number stays its group's.
		err := unix.Waitid(unix.P_PID, p.cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	p.kill()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.how = p.cmd.Wait()
	p.reaped = true
}

// kill kills the process and its group. It is safe to call again, also after the end.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		_ = unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL)
	}
}

// reason returns how the process ended, for people.
func (p *process) reason() string {
	if p.how == nil {
		return "it has ended"
	}
	return "it has ended: " + p.how.Error()
}

// logLines logs what a program prints, until its end.
func logLines(r io.Reader, log *zap.Logger) {
	lines := bufio.NewReaderSize(r, maxLine)
	for {
		line, err := lines.ReadSlice('\n')
		if text := strings.TrimRight(strings.ToValidUTF8(string(line), "\uFFFD"), "\r\n"); text != "" {
			log.Info("the program prints", zap.String("line", text))
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}
