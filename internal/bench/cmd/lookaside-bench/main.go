// Lookaside-bench measures the sidecar's parts on this machine, each against what the machine can
// do at best. bench/run runs its benches by name, beside those in bench/.
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

	"lookaside/internal/bench"
	"lookaside/internal/bench/enginebench"
	"lookaside/internal/bench/lookupserver"
	"lookaside/internal/bench/memcopybench"
	"lookaside/internal/bench/zmqecho"
	"lookaside/internal/bytesize"
	"lookaside/sidecar"
	"lookaside/sidecar/settings"
)

func main() {
	if err := newRoot().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "lookaside-bench:", err)
		os.Exit(1)
	}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "lookaside-bench",
		Version:       sidecar.VersionLine(),
		Short:         "Measure parts of the sidecar on this machine",
		SilenceErrors: true, // main prints it
		SilenceUsage:  true,
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return settings.FlagError(cmd.Flags(), err)
	})
	root.AddCommand(newEngine(), newMemcopy(), newPromotion(), newDisk(), newDAX(), newRedis(),
		newProgram(), newRecovery(), newRestart(), newPeers(), newLookupServer(), newEcho(),
		newPlot())
	return root
}

func addJSONFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "json", "", "also write the figures to this `file`")
}

// interruptible returns a context that ends with the first Ctrl-C or SIGTERM. The next one ends the
// process.
func interruptible(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

func newMemcopy() *cobra.Command {
	var (
		file string
		o    memcopybench.Options
	)
	cmd := &cobra.Command{
		Use:   "memcopy",
		Short: "Speed of the sidecar's copies against the built-in copy",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd)
			defer stop()
			ms, err := memcopybench.Run(ctx, o)
			if err != nil {
				return err
			}
			return memcopyReport(ms).Print(cmd.OutOrStdout(), cmd.ErrOrStderr(), file)
		},
	}
	addJSONFlag(cmd, &file)
	cmd.Flags().IntVar(&o.Rounds, "rounds", 9, "how often each is measured; the median counts")
	return cmd
}

func memcopyReport(ms []memcopybench.Measurement) *bench.Report {
	r := bench.NewReport("memcopy")
	for _, m := range ms {
		of := fmt.Sprintf("%s.%d_threads", bytesize.Format(int64(m.SizeBytes)), m.Threads)
		r.Rounds("copy."+of, "GB/s", m.Copy, m.GoCopy)
		r.Rounds("pool."+of, "GB/s", m.Pool, m.GoCopy)
	}
	return r
}

func newEngine() *cobra.Command {
	var (
		file  string
		pages []int
	)
	cmd := &cobra.Command{
		Use:   "engine",
		Short: "Lookups and stores of the engine, with many pages held",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report := bench.NewReport("engine")
			for _, n := range pages {
				r, err := enginebench.Run(n)
				if err != nil {
					return err
				}
				addEngine(report, n, r.Chunked)
				addEngine(report, n, r.Single)
			}
			return report.Print(cmd.OutOrStdout(), cmd.ErrOrStderr(), file)
		},
	}
	addJSONFlag(cmd, &file)
	cmd.Flags().IntSliceVar(&pages, "pages", []int{1_000_000, 10_000_000}, "pages held")
	return cmd
}

// addEngine adds the figures of an engine with the given number of pages.
func addEngine(r *bench.Report, pages int, f enginebench.Figures) {
	of := fmt.Sprintf(".%d_pages.%d_a_chunk", pages, f.PagesPerChunk)
	r.Rounds("hits_4096.p50"+of, "us", f.HitsUs, f.BareUs)
	r.Add("hits_4096.p99.9"+of, bench.Quantile(f.HitsUs, 0.999), "us")
	r.Add("lookups_4096"+of, f.LookupsPerSecond, "1/s")
	r.Add("lookups_64"+of, f.ShortPerSecond, "1/s")
	r.Add("stored_pages"+of, f.StorePagesPerSecond, "1/s")
	r.Add("filled_pages"+of, f.FillPagesPerSecond, "1/s")
	r.Add("memory_a_page"+of, f.BytesPerPage, "B")
}

func newLookupServer() *cobra.Command {
	var o lookupserver.Options
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
			log := sidecar.NewLogger(settings.LogConfig{Level: "warn", Format: "console"},
				os.Stderr)
			return lookupserver.Serve(ctx, o, cmd.InOrStdin(), cmd.OutOrStdout(), log)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Pages, "pages", 1_000_000, "pages indexed")
	f.IntVar(&o.PrefixPages, "prefix-pages", 4096, "pages of each prefix")
	f.IntVar(&o.PagesPerChunk, "pages-per-chunk", 16, "pages of a chunk")
	f.IntVar(&o.CopyThreads, "copy-threads", 0, "threads that copy memory at full speed meanwhile")
	return cmd
}

func newEcho() *cobra.Command {
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
			// A client reads this line while the command is still running.
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
