package ipc

import (
	"bufio"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func claim(t *testing.T, l *Listener, generation uint64) int {
	t.Helper()
	fd, err := l.Claim(generation)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

func claimed(t *testing.T, l *Listener, except uint64) bool {
	t.Helper()
	held, err := l.Claims(except)
	if err != nil {
		t.Fatal(err)
	}
	return held
}

func TestClaimIsOfItsGeneration(t *testing.T) {
	l := listen(t, Options{})
	for _, g := range []uint64{0, 1, 77, claimBytes - 2, claimBytes - 1} {
		if claimed(t, l, g) || claimed(t, l, g+1) {
			t.Fatalf("claimed before the claim on %d", g)
		}
		fd := claim(t, l, g)
		for _, except := range []uint64{0, 1, 77, 78, claimBytes - 2, claimBytes - 1} {
			if got, want := claimed(t, l, except), except != g; got != want {
				t.Errorf("claim on %d: except %d: %v", g, except, got)
			}
		}
		unix.Close(fd)
	}
	fd := claim(t, l, claimBytes+5)
	defer unix.Close(fd)
	if claimed(t, l, 5) || claimed(t, l, claimBytes+5) || !claimed(t, l, 6) {
		t.Error("the generation is not taken modulo 2^62")
	}
}

func TestClaimEndsWithItsLastDescriptor(t *testing.T) {
	l := listen(t, Options{})
	a, b := claim(t, l, 3), claim(t, l, 3)
	c, err := unix.FcntlInt(uintptr(a), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range []int{b, a, c} {
		if !claimed(t, l, 4) {
			t.Fatal("not claimed, with a descriptor open")
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil ||
			flags&unix.FD_CLOEXEC == 0 {
			t.Fatalf("flags %x, %v", flags, err)
		}
		unix.Close(fd)
	}
	if claimed(t, l, 4) {
		t.Fatal("claimed, with all descriptors closed")
	}
}

// A claim is seen by the next owner of the directory, is kept by a process that is stopped, and
// ends with the process.
func TestClaimOutlivesItsSidecarAndNotItsProcess(t *testing.T) {
	l := listen(t, Options{})
	fd := claim(t, l, 10)
	f := os.NewFile(uintptr(fd), "claim")
	worker := exec.Command("sh", "-c", "echo ready; exec sleep 600")
	worker.ExtraFiles = []*os.File{f}
	out, err := worker.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := worker.Start(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	t.Cleanup(func() {
		_ = worker.Process.Kill()
		_ = worker.Wait()
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	dev, inode := l.LockID()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if held, err := l.Claims(11); !held || err == nil {
		t.Fatalf("after Close: %v, %v", held, err)
	}
	if fd, err := l.Claim(11); fd >= 0 || err == nil {
		t.Fatalf("after Close: %d, %v", fd, err)
	}

	next, err := Listen(l.Dir(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	if d, i := next.LockID(); d != dev || i != inode || inode == 0 {
		t.Fatalf("lock %d:%d, was %d:%d", d, i, dev, inode)
	}
	own := claim(t, next, 11)
	defer unix.Close(own)
	if err := worker.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if !claimed(t, next, 11) {
		t.Fatal("the claim of a stopped process has ended")
	}
	if pids := next.Claimants(11); !slices.Equal(pids, []int{worker.Process.Pid}) {
		t.Fatalf("claimants %v, want %d", pids, worker.Process.Pid)
	}
	if pids := next.Claimants(10); !slices.Equal(pids, []int{os.Getpid()}) {
		t.Fatalf("claimants of the new generation %v, want %d", pids, os.Getpid())
	}
	_ = worker.Process.Kill()
	_ = worker.Wait()
	if claimed(t, next, 11) {
		t.Fatal("the claim of a dead process has not ended")
	}
	if pids := next.Claimants(11); len(pids) != 0 {
		t.Fatalf("claimants %v", pids)
	}
}

func TestListenerOfPeersHasNoClaims(t *testing.T) {
	d, err := OpenPeerDir(runDir(t))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	l, err := d.Listen(1, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := l.Claim(1); err == nil {
		t.Error("claimed")
	}
	if held, err := l.Claims(1); !held || err == nil {
		t.Errorf("%v, %v", held, err)
	}
	if dev, inode := l.LockID(); dev != 0 || inode != 0 || l.Claimants(1) != nil {
		t.Error("it has a lock")
	}
}
