//go:build linux

package dax

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// populateStep is how much of a mapping one MADV_POPULATE_WRITE covers. It is large enough to make
// the cost of the system call negligible, and small enough to divide the work evenly and to stop
// early. A step has taken seconds where a hypervisor was short of memory.
const populateStep = 8 << 20

// populate allocates every page of mem with the given number of system threads; 0 means one for
// each core that this process may use. It returns an error for a shortage that would be SIGBUS at
// the first touch, or ctx's cause if ctx ends first.
func populate(ctx context.Context, mem []byte, threads int) error {
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
				if ctx.Err() != nil {
					failed <- context.Cause(ctx)
					return
				}
				if err := populateWrite(mem[at:min(at+populateStep, len(mem))]); err != nil {
					next.Store(int64(steps)) // the remaining steps are not needed
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
			// EFAULT takes the place of SIGBUS: the pool, its cgroup or the filesystem does not
			// provide a page.
			return fmt.Errorf("%w: populating %d bytes: %w", ErrNoMemory, len(mem), err)
		default:
			return fmt.Errorf("populating %d bytes: %w", len(mem), err)
		}
	}
}

// touch populates without MADV_POPULATE_WRITE. The memory is not shared yet, so writing back what
// was read changes nothing.
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
