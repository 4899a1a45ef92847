//go:build linux

package dax

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// populateStep is how much of a mapping one MADV_POPULATE_WRITE covers: long
// enough to make the system call's price vanish, short enough to share the
// work evenly and to let a failure end it early.
const populateStep = 64 << 20

// populate allocates every page of mem with threads system threads (0: one a
// core that this process may use). A shortage is an error here where the first
// touch would have been SIGBUS.
func populate(mem []byte, threads int) error {
	if threads <= 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	steps := (len(mem) + populateStep - 1) / populateStep
	threads = min(threads, steps)
	var next atomic.Int64
	failed := make(chan error, threads)
	for range threads {
		go func() {
			for {
				at := int(next.Add(1)-1) * populateStep
				if at >= len(mem) {
					failed <- nil
					return
				}
				if err := populateWrite(mem[at:min(at+populateStep, len(mem))]); err != nil {
					next.Store(int64(steps)) // nobody needs the rest
					failed <- err
					return
				}
			}
		}()
	}
	var errs []error
	for range threads {
		errs = append(errs, <-failed)
	}
	return errors.Join(errs...)
}

func populateWrite(mem []byte) error {
	for {
		err := unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue
		case errors.Is(err, unix.EINVAL): // before Linux 5.14
			return touch(mem)
		case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EFAULT):
			// EFAULT is what SIGBUS would have been: a page that the
			// pool, its cgroup or the filesystem does not give.
			return fmt.Errorf("%w: populating %d bytes: %w", ErrNoMemory, len(mem), err)
		default:
			return fmt.Errorf("populating %d bytes: %w", len(mem), err)
		}
	}
}

// touch populates without MADV_POPULATE_WRITE. The memory is still nobody
// else's, so writing what was read changes nothing.
func touch(mem []byte) error {
	err := Guard(func() {
		for i := 0; i < len(mem); i += 4096 {
			mem[i] = 0
		}
	}, mem)
	if err != nil {
		return fmt.Errorf("%w: populating %d bytes: %w", ErrNoMemory, len(mem), err)
	}
	return nil
}
