package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"lookaside/sidecar"
)

func newServe() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run a sidecar until it is interrupted",
		Long: `Run a sidecar until it is interrupted.

Settings come from a YAML file (--config), LOOKASIDE_* environment variables and flags, each overriding the one before.
The first Ctrl-C (or SIGTERM) drains: no new sessions, stores and loads under way may finish; the second leaves at once.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := sidecar.Load(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			log := sidecar.NewLogger(cfg.Log, os.Stderr)
			defer func() { _ = log.Sync() }() // standard error may refuse fsync; nothing is lost by that
			return serve(cfg, log)
		},
	}
	sidecar.AddFlags(cmd.Flags())
	return cmd
}

// serve runs one sidecar from start to drain.
func serve(cfg sidecar.Config, log *zap.Logger) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	ctx, stop := context.WithCancelCause(context.Background())
	defer stop(nil)
	go func() {
		first := <-signals
		log.Info("draining; another signal leaves at once", zap.Stringer("signal", first), zap.Duration("at_most", cfg.Lifecycle.Drain+cfg.Lifecycle.Flush))
		stop(errInterrupted)
		second := <-signals
		log.Warn("leaving at once", zap.Stringer("signal", second))
		os.Exit(128 + int(second.(syscall.Signal)))
	}()

	d, err := sidecar.Start(ctx, cfg, log)
	if err != nil {
		if errors.Is(context.Cause(ctx), errInterrupted) {
			return nil
		}
		return err
	}
	var failure error
	select {
	case <-ctx.Done():
	case failure = <-d.Done():
	}
	// Closing what is drained takes a little longer than the drain itself.
	drain, cancel := context.WithTimeout(context.Background(), cfg.Lifecycle.Drain+cfg.Lifecycle.Flush+time.Second)
	defer cancel()
	return errors.Join(failure, d.Shutdown(drain))
}

var errInterrupted = errors.New("interrupted")
