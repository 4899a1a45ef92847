package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/ipc"
	"lookaside/sidecar"
	"lookaside/sidecar/settings"
	"lookaside/sidecar/systemd"
)

func newServe() *cobra.Command {
	var (
		background, helpAll, takeOver bool
		readyFD                       int
	)
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run a sidecar until it is interrupted",
		Long: `Run a sidecar until it is interrupted.

Settings come from a YAML file (--config), LOOKASIDE_* environment variables and flags, each
overriding the one before. The flags below are those that most sidecars need; --help-all lists
the others. docs/configuration.md has them all as well.

The first Ctrl-C, SIGTERM or SIGHUP drains: no new sessions, stores and loads under way may
finish, what waits for the tiers is written. Another one leaves at once; within the first second
it does not count.

With --takeover it takes over from the sidecar that serves in the directory, under traffic: that
one lets open stores end, passes on its memory, its sockets and all that clients hold, and exits.
vLLM notices nothing: no session ends, what was stored hits, and lookups wait some milliseconds.
So a sidecar is upgraded, or gets other settings. It must be given the settings of the sidecar
that serves, except those that are to change. What it could not take is refused before the other
sidecar is disturbed; it then goes on serving, and the exit code is 75. The exit code is 69 if no
sidecar serves there. docs/operations.md says which releases can follow each other.`,
		Example: "  lookaside serve --arena-limit 64G\n  lookaside serve --arena-limit 64G --disk /mnt/nvme0/kv:800G --redis redis://cache.internal\n  lookaside serve --arena-limit 96G --takeover --detach",
		Args:    noValues,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if helpAll {
				return cmd.Help()
			}
			if background {
				return detach(cmd, os.Args[1:])
			}
			if readyFD < 0 {
				return runServe(cmd, os.Stderr, takeOver, func(error) {})
			}
			report, err := reportTo(readyFD)
			if err != nil {
				return err
			}
			err = runServe(cmd, nil, takeOver, report)
			report(cmp.Or(err, errInterrupted)) // no effect if it has served
			return err
		},
	}
	cmd.Flags().BoolVar(&background, detachFlag, false,
		"start in the background, and return when it serves: the log is "+sidecar.LogName+
			" in the directory")
	cmd.Flags().BoolVar(&takeOver, takeOverFlag, false,
		"take over from the sidecar that serves in the directory, without its clients noticing")
	cmd.Flags().IntVar(&readyFD, readyFlag, -1, "`descriptor` to report to")
	_ = cmd.Flags().MarkHidden(readyFlag)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return coded{exitSettings,
			flagError(cmd, err)}
	})
	settings.AddFlags(cmd.Flags())
	cmd.Flags().BoolVar(&helpAll, "help-all", false, "help for all flags")
	help := cmd.HelpFunc()
	cmd.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if !helpAll {
			showOnly(cmd.Flags(), append(settings.MainFlags(), "help", "help-all"))
		}
		help(cmd, args)
	})
	return cmd
}

// defaultIs precedes a setting's default in the text of its flag.
const defaultIs = "; default: "

// showOnly makes the help show only these flags, each with the first sentence of its text and its
// default.
func showOnly(fs *pflag.FlagSet, names []string) {
	fs.VisitAll(func(f *pflag.Flag) {
		f.Hidden = !slices.Contains(names, f.Name)
		if first, rest, more := strings.Cut(f.Usage, ". "); more {
			if f.Usage = first; strings.Contains(rest, defaultIs) {
				f.Usage += rest[strings.LastIndex(rest, defaultIs):]
			}
		}
	})
}

// takeOverFlag is the flag to take over from the sidecar that serves.
const takeOverFlag = "takeover"

// noValues refuses arguments. An argument is usually meant as the value of a flag that is true or
// false.
func noValues(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if _, err := strconv.ParseBool(args[0]); err == nil {
		return coded{exitSettings,
			fmt.Errorf("%q belongs to no flag: write --FLAG=%s for a flag that is true or false",
				args[0], args[0])}
	}
	return coded{exitSettings, fmt.Errorf("%s takes no arguments, and %q is one", cmd.CommandPath(),
		args[0])}
}

// secondSignalAfter is how long further signals do not count after the first one. timeout(1), a
// terminal's Ctrl-C and some supervisors send the same signal twice, to the process and to its
// group.
const secondSignalAfter = time.Second

// runServe runs the sidecar that the flags and the environment describe. It logs to w. If w is nil,
// it logs to a file of its own, which also becomes standard error. It calls report when the sidecar
// serves; an error before that is returned, not reported.
func runServe(cmd *cobra.Command, w io.Writer, takeOver bool, report func(error)) error {
	cfg, err := settings.Load(cmd.Flags(), os.Environ())
	if err != nil {
		return coded{exitSettings, err}
	}
	if w == nil {
		file, err := sidecar.OpenLogFile(cfg.Runtime.Dir, sidecar.LogLimit)
		if err != nil {
			return err
		}
		defer file.Close()
		w = file
	}
	log := sidecar.NewLogger(cfg.Log, w)
	defer func() { _ = log.Sync() }() // standard error may refuse fsync, which loses nothing
	return serve(cfg, log, takeOver, report)
}

// serve runs one sidecar from its start to the end of its drain.
func serve(cfg settings.Config, log *zap.Logger, takeOver bool, report func(error)) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup ignores it
		signal.Notify(signals, syscall.SIGHUP)
	}
	defer signal.Stop(signals)
	// The reader of the log may end first, as in "lookaside serve 2>&1 | tee log" after Ctrl-C.
	// That must not end the drain.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := context.WithCancelCause(context.Background())
	defer stop(nil)
	go func() {
		first := <-signals
		stop(errInterrupted)
		log.Info("draining; another signal leaves at once, from a second on",
			zap.Stringer("signal", first),
			zap.Duration("at_most", cfg.Lifecycle.Drain+cfg.Lifecycle.Flush))
		second := awaitSecond(signals)
		log.Warn("leaving at once", zap.Stringer("signal", second))
		os.Exit(128 + int(second.(syscall.Signal)))
	}()

	origin := sidecar.Origin{Manager: systemd.Find(), Inherited: systemd.Inherited()}
	if takeOver {
		var err error
		if origin.Takeover, err = sidecar.TakeOver(ctx, &cfg, log); err != nil {
			return coded{exitCode(err), err}
		}
	}
	d, err := sidecar.Start(ctx, cfg, log, origin)
	if err != nil {
		if errors.Is(context.Cause(ctx), errInterrupted) {
			return nil
		}
		return coded{exitCode(err), err}
	}
	report(nil)
	var failure error
	select {
	case <-ctx.Done():
	case failure = <-d.Done():
	}
	// Closing takes a little longer than the drain itself.
	drain, cancel := context.WithTimeout(context.Background(), cfg.Lifecycle.Drain+
		cfg.Lifecycle.Flush+time.Second)
	defer cancel()
	return errors.Join(failure, d.Shutdown(drain))
}

// awaitSecond returns the first signal that arrives after secondSignalAfter. Signals that are
// pending then do not count, so a process that was stopped in the meantime drains instead of
// leaving.
func awaitSecond(signals <-chan os.Signal) os.Signal {
	time.Sleep(secondSignalAfter)
	for {
		select {
		case <-signals:
		default:
			return <-signals
		}
	}
}

// exitCode returns the exit code of a failed start.
func exitCode(err error) int {
	var owned *ipc.OwnedError
	var refused *sidecar.RefusedError
	switch {
	case errors.As(err, &owned), errors.As(err, &refused):
		return exitOwned
	case errors.Is(err, sidecar.ErrNoSidecar):
		return exitNone
	case errors.Is(err, dax.ErrTooLarge):
		return exitSettings
	}
	return exitFailure
}

var errInterrupted = errors.New("interrupted")
