package sidecar

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// keepStderr gives the process its standard error back when the test ends.
func keepStderr(t *testing.T) {
	t.Helper()
	kept, err := unix.FcntlInt(2, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Dup3(kept, 2, 0); err != nil {
			t.Error(err)
		}
		unix.Close(kept)
	})
}

func TestLogFileIsRotated(t *testing.T) {
	keepStderr(t)
	dir := filepath.Join(t.TempDir(), "rank-0")
	const limit = 1000
	l, err := OpenLogFile(dir, limit)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { l.Close() }()
	line := func(n int) string { return fmt.Sprintf("%99d\n", n) }
	for n := range 35 {
		if _, err := l.Write([]byte(line(n))); err != nil {
			t.Fatal(err)
		}
	}
	// What the runtime and libzmq write goes to the same file.
	if _, err := unix.Write(2, []byte("last words\n")); err != nil {
		t.Fatal(err)
	}
	want := func(name, content string) {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if string(b) != content {
			t.Errorf("%s has\n%s", name, b)
		}
	}
	var before, after strings.Builder
	for n := range 35 {
		switch {
		case n >= 30:
			after.WriteString(line(n))
		case n >= 20:
			before.WriteString(line(n))
		}
	}
	after.WriteString("last words\n")
	want(LogName+".1", before.String())
	want(LogName, after.String())
	if files, _ := filepath.Glob(filepath.Join(dir, "*")); len(files) != 2 {
		t.Errorf("there are %v", files)
	}

	// Who opens it again goes on where it ended, and a file that cannot be renamed is written to
	// all the same.
	l.Close()
	if l, err = OpenLogFile(dir, limit); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, LogName+".1")); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, LogName+".1", "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	for n := 35; n < 50; n++ {
		if _, err := l.Write([]byte(line(n))); err != nil {
			t.Fatal(err)
		}
		after.WriteString(line(n))
	}
	want(LogName, after.String())
}

// A log may be no link: whoever could put one there would have another file written to.
func TestLogFileIsNoLink(t *testing.T) {
	keepStderr(t)
	dir := filepath.Join(t.TempDir(), "rank-0")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/null", filepath.Join(dir, LogName)); err != nil {
		t.Fatal(err)
	}
	if l, err := OpenLogFile(dir, 1000); err == nil {
		l.Close()
		t.Error("it was opened")
	}
}
