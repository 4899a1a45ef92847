package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"lookaside/dax"
	"lookaside/dax/memcopy"
	"lookaside/internal/bench/enginebench"
	"lookaside/internal/bench/zmqecho"
	"lookaside/sidecar"
)

func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure parts of the sidecar on this machine",
		Args:  cobra.NoArgs,
		// or a wrong name would pass for success
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newBenchEngine(), newBenchMemcopy(), newBenchPromotion(), newBenchDisk(),
		newBenchDAX(), newBenchRedis(), newBenchRecovery(), newBenchPeers(), newBenchLookupServer(),
		newBenchEcho())
	return cmd
}

// interruptible is a context that ends with the first Ctrl-C or SIGTERM; after it, the next one
// ends the process.
func interruptible(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

func newBenchMemcopy() *cobra.Command {
	var (
		file string
		o    memcopy.MeasureOptions
	)
	cmd := &cobra.Command{
		Use:   "memcopy",
		Short: "Speed of the sidecar's copies against the built-in copy",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd)
			defer stop()
			ms, err := memcopy.Measure(ctx, o)
			if err != nil {
				return err
			}
			return memcopyReport(ms).print(cmd, file)
		},
	}
	addJSONFlag(cmd, &file)
	cmd.Flags().IntVar(&o.Rounds, "rounds", 9, "how often each is measured; the median counts")
	return cmd
}

func memcopyReport(ms []memcopy.Measurement) *benchReport {
	r := newBenchReport("memcopy")
	for _, m := range ms {
		of := fmt.Sprintf("%s.%d_threads", dax.FormatSize(int64(m.SizeBytes)), m.Threads)
		r.rounds("copy."+of, "GB/s", m.Copy, m.GoCopy)
		r.rounds("pool."+of, "GB/s", m.Pool, m.GoCopy)
	}
	return r
}

func newBenchEngine() *cobra.Command {
	var (
		file  string
		pages []int
	)
	cmd := &cobra.Command{
		Use:   "engine",
		Short: "Lookups and stores of the engine, with many pages held",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report := newBenchReport("engine")
			for _, n := range pages {
				r, err := enginebench.Run(n)
				if err != nil {
					return err
				}
				addEngine(report, n, r.Chunked)
				addEngine(report, n, r.Single)
			}
			return report.print(cmd, file)
		},
	}
	addJSONFlag(cmd, &file)
	cmd.Flags().IntSliceVar(&pages, "pages", []int{1_000_000, 10_000_000}, "pages held")
	return cmd
}

// addEngine adds the figures of an engine that was to hold the given number of pages.
func addEngine(r *benchReport, pages int, f enginebench.Figures) {
	of := fmt.Sprintf(".%d_pages.%d_a_chunk", pages, f.PagesPerChunk)
	r.rounds("hits_4096.p50"+of, "us", f.HitsUs, f.BareUs)
	r.add("hits_4096.p99.9"+of, quantile(f.HitsUs, 0.999), "us")
	r.add("lookups_4096"+of, f.LookupsPerSecond, "1/s")
	r.add("lookups_64"+of, f.ShortPerSecond, "1/s")
	r.add("stored_pages"+of, f.StorePagesPerSecond, "1/s")
	r.add("filled_pages"+of, f.FillPagesPerSecond, "1/s")
	r.add("memory_a_page"+of, f.BytesPerPage, "B")
}

func newBenchLookupServer() *cobra.Command {
	var o sidecar.LookupServerOptions
	cmd := &cobra.Command{
		Use:   "lookup-server",
		Short: "Run a sidecar with many pages indexed, for a client to measure lookups with",
		Long: `Run a sidecar in a directory of its own with many pages indexed, for a client to measure lookups
with.

It prints one line of JSON when it serves: its endpoint, and which pages it holds. It ends when
its standard input does.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd)
			defer stop()
			log := sidecar.NewLogger(sidecar.LogConfig{Level: "warn", Format: "console"}, os.Stderr)
			return sidecar.ServeLookups(ctx, o, cmd.InOrStdin(), cmd.OutOrStdout(), log)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Pages, "pages", 1_000_000, "pages indexed")
	f.IntVar(&o.PrefixPages, "prefix-pages", 4096, "pages of each prefix")
	f.IntVar(&o.PagesPerChunk, "pages-per-chunk", 16, "pages of a chunk")
	f.IntVar(&o.CopyThreads, "copy-threads", 0, "threads that copy memory at full speed meanwhile")
	return cmd
}

func newBenchEcho() *cobra.Command {
	var replyBytes int
	cmd := &cobra.Command{
		Use:   "echo",
		Short: "Answer ZMQ messages with as little work as can be, for a client to measure that as its limit",
		Long: `Answer ZMQ messages with as little work as can be, for a client to measure that as its limit.

It prints one line of JSON when it serves: the endpoints to push to and to pull from. It ends
when its standard input does.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := os.MkdirTemp("", "lookaside-echo-")
			if err != nil {
				return err
			}
			defer os.RemoveAll(dir)
			push, pull := "ipc://"+filepath.Join(dir, "in"), "ipc://"+filepath.Join(dir, "out")
			ready, done := make(chan struct{}), make(chan error, 1)
			// It is never stopped: the process ends with the command.
			go func() { done <- zmqecho.Serve(push, pull, replyBytes, func() { close(ready) }) }()
			select {
			case err := <-done:
				return err
			case <-ready:
			}
			// One line, unlike printJSON's: a client reads it while we go on.
			if err := json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]string{"push": push,
				"pull": pull}); err != nil {
				return err
			}
			ctx, stop := interruptible(cmd)
			defer stop()
			go func() {
				_, _ = io.Copy(io.Discard, cmd.InOrStdin())
				stop()
			}()
			select {
			case err := <-done:
				return err
			case <-ctx.Done():
				return nil
			}
		},
	}
	cmd.Flags().IntVar(&replyBytes, "reply-bytes", -1,
		"bytes of each answer; negative: the message itself")
	return cmd
}
