package sidecar

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"lookaside/ipc"
)

// LogName is the log, in runtime.dir, of a sidecar that runs in the background. LogName.1 has the
// log from before the last rotation.
const LogName = "sidecar.log"

// LogLimit is the size in bytes at which a background log is rotated. Two files of that size are
// kept.
const LogLimit = 16 << 20

// A LogFile is a rotated log. A file that would grow beyond its limit is renamed and replaces the
// one renamed before. Standard error always follows the newest file, because the Go runtime and
// libzmq write their last words there. A library that rotates only its own writes would leave those
// in a file that it removes.
//
// Write may be called from any goroutine.
type LogFile struct {
	path  string
	limit int64

	mu   sync.Mutex
	file *os.File
	size int64 // of file
	tell int64 // rotation is tried at this size
}

// OpenLogFile opens the log of the sidecar with the given runtime.dir and makes it standard error.
// It makes the directory if it is missing.
func OpenLogFile(dir string, limit int64) (*LogFile, error) {
	if err := ipc.MakeDir(dir); err != nil {
		return nil, err
	}
	l := &LogFile{path: filepath.Join(dir, LogName), limit: limit}
	if err := l.open(); err != nil {
		return nil, err
	}
	return l, nil
}

// open opens the file at path, new or not, and makes it standard error. The caller holds l.mu.
func (l *LogFile) open() error {
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("log: %w", err)
	}
	st, err := f.Stat()
	if err == nil {
		err = unix.Dup3(int(f.Fd()), int(os.Stderr.Fd()), 0)
	}
	if err != nil {
		f.Close()
		return fmt.Errorf("log: %w", err)
	}
	if l.file != nil {
		l.file.Close()
	}
	l.file, l.size, l.tell = f, st.Size(), l.limit
	return nil
}

// Write implements io.Writer. A line is never divided between two files.
func (l *LogFile) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.size > 0 && l.size+int64(len(b)) > l.tell {
		err := os.Rename(l.path, l.path+".1")
		if err == nil {
			err = l.open()
		}
		if err != nil { // keep the present file
			l.tell = l.size + l.limit
		}
	}
	n, err := l.file.Write(b)
	l.size += int64(n)
	return n, err
}

// Close closes the file; standard error keeps it open.
func (l *LogFile) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.file.Close()
}
