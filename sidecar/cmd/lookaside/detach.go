package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"lookaside/sidecar"
	"lookaside/sidecar/settings"
)

// To run a sidecar in the background, the command with --detach starts a child, which leads a
// session of its own and becomes the sidecar. The command waits until the child serves or has
// failed, and then ends. So the sidecar is a descendant neither of the command nor of the command's
// caller, and a program that kills all its descendants does not reach it.

// These are the flags of serve for this. The second one is the descriptor that the sidecar writes
// to once it serves.
const (
	detachFlag = "detach"
	readyFlag  = "ready-fd"
)

// serves is what the sidecar writes when it serves. Any other text is the reason why it does not.
const serves = "serves"

// detach starts a sidecar in the background with the arguments of this process. It returns when the
// sidecar serves.
func detach(cmd *cobra.Command, args []string) error {
	cfg, err := settings.Load(cmd.Flags(), os.Environ())
	if err != nil {
		return coded{exitSettings, err}
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	child := exec.Command(program, append(withoutDetach(args), "--"+readyFlag+"=3")...)
	child.ExtraFiles = []*os.File{w}
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := child.Start(); err != nil {
		return err
	}
	w.Close()
	// A signal to this process during the wait is meant for the sidecar.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, unix.SIGTERM, unix.SIGHUP)
	defer signal.Stop(signals)
	go func() {
		<-signals
		_ = child.Process.Signal(unix.SIGTERM)
	}()

	log := filepath.Join(cfg.Runtime.Dir, sidecar.LogName)
	said, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	if string(said) == serves {
		fmt.Fprintf(cmd.OutOrStdout(), "lookaside: serving on %s, pid %d, log %s\n",
			cfg.Runtime.Dir, child.Process.Pid, log)
		return nil
	}
	err = child.Wait()
	code := exitFailure
	if status := (*exec.ExitError)(nil); errors.As(err, &status) && status.Exited() {
		code = status.ExitCode()
	}
	if why := bytes.TrimSpace(said); len(why) > 0 {
		return coded{code, errors.New(string(why))}
	}
	if err == nil {
		err = errors.New("exit status 0")
	}
	return coded{code, fmt.Errorf("the sidecar ended before it served: %w; its log is %s", err,
		log)}
}

// withoutDetach returns a command line without the flag.
func withoutDetach(args []string) []string {
	return slices.DeleteFunc(slices.Clone(args), func(arg string) bool {
		return arg == "--"+detachFlag || strings.HasPrefix(arg, "--"+detachFlag+"=")
	})
}

// reportTo returns a function that writes to the descriptor: that the sidecar serves, for nil, or
// the error. Only its first call has an effect.
func reportTo(fd int) (func(error), error) {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return nil, fmt.Errorf("--%s=%s: %w", readyFlag, strconv.Itoa(fd), err)
	}
	f := os.NewFile(uintptr(fd), readyFlag)
	var once sync.Once
	return func(err error) {
		once.Do(func() {
			text := serves
			if err != nil {
				text = strings.ReplaceAll(err.Error(), "\n", "; ")
			}
			_, _ = f.WriteString(text) // the reader may be gone
			f.Close()
		})
	}, nil
}
