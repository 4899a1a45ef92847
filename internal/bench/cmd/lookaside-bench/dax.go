package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"lookaside/dax"
	"lookaside/internal/bench"
	"lookaside/internal/bench/daxbench"
	"lookaside/internal/bytesize"
)

// These bound the time to open a pool, and the factor by which a migration may slow lookups down.
const (
	recoverySeconds  = 2.0 // a million chunks
	migrationFactor  = 2.0
	minMigratedBytes = 2 << 20
)

func newDAX() *cobra.Command {
	var (
		file, kind string
		slots      []string
		o          daxbench.Transfers
		recovery   daxbench.Recovery
		migration  daxbench.Migration
	)
	cmd := &cobra.Command{
		Use:   "dax",
		Short: "Restores and stores of a tier on DAX devices, against a bare copy loop; its recovery; and lookups beside a migration",
		Long: `Restores and stores of a tier on DAX devices, against the faster of two bare copy loops with as
many threads; opening a tier that holds many chunks; and lookups while a device's chunks move to
another, against lookups without. Files in memory stand in for devices.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Kind, err = dax.ParseKind(kind); err != nil {
				return fmt.Errorf("--kind: %w", err)
			}
			recovery.Dir, recovery.Rounds = o.Dir, o.Rounds
			migration.Dir, migration.Rounds, migration.SlotBytes = o.Dir, o.Rounds, minMigratedBytes
			ctx, stop := interruptible(cmd)
			defer stop()
			report := bench.NewReport("dax")
			for _, slot := range slots {
				if o.SlotBytes, err = bytesize.Parse(slot); err != nil {
					return fmt.Errorf("--slots: %w", err)
				}
				f, err := o.Run(ctx)
				if err != nil {
					return err
				}
				of := "." + bytesize.Format(o.SlotBytes)
				fmt.Fprintf(cmd.ErrOrStderr(), "%s: %d of %d chunks, arena of %s\n", of[1:],
					f.Chunks, o.Chunks, f.Memory)
				for _, way := range []struct {
					name string
					daxbench.Direction
				}{{"restore" + of, f.Restore}, {"store" + of, f.Store}} {
					limits, loop := way.Limit()
					fmt.Fprintf(cmd.ErrOrStderr(), "%s: the limit is %s\n", way.name, loop)
					report.Rounds(way.name, "GB/s", way.Tier, limits)
				}
				report.Add("chunks"+of, float64(f.Chunks), "")
			}
			if recovery.Chunks > 0 {
				seconds, err := recovery.Run(ctx)
				if err != nil {
					return err
				}
				report.Rounds(fmt.Sprintf("open.%d_chunks", recovery.Chunks), "s", seconds,
					constant(len(seconds), recoverySeconds*float64(recovery.Chunks)/1e6))
			}
			if migration.Chunks > 0 {
				f, err := migration.Measure(ctx)
				if err != nil {
					return err
				}
				limits := make([]float64, len(f.Without))
				for i, v := range f.Without {
					limits[i] = migrationFactor * v
				}
				report.Rounds("lookup_p99.migrating", "µs", f.With, limits)
				report.Add("lookup_p99.idle", bench.Quantile(f.Without, 0.5), "µs")
				report.Add("migration", bench.Quantile(f.Speed, 0.5), "GB/s")
			}
			return report.Print(cmd.OutOrStdout(), cmd.ErrOrStderr(), file)
		},
	}
	addJSONFlag(cmd, &file)
	fs := cmd.Flags()
	fs.StringVar(&o.Dir, "dir", "",
		"directory for the files that stand in for devices (default: /dev/shm)")
	fs.StringSliceVar(&slots, "slots", []string{"2M", "8M", "32M"}, "bytes of a chunk")
	fs.IntVar(&o.Chunks, "chunks", 128,
		"chunks restored and stored each round; fewer where memory is short")
	fs.IntVar(&o.Threads, "threads", 8, "threads that copy, in the limit as well")
	fs.IntVar(&o.Regions, "regions", 8, "runs of neighbouring chunks under way at a time")
	fs.StringVar(&kind, "kind", "auto", "kind of the arena's memory: auto, hugetlb, thp or memfd")
	fs.IntVar(&o.Rounds, "rounds", 7, "how often each is measured; the median counts")
	fs.IntVar(&recovery.Chunks, "recovery", 1_000_000,
		"chunks that are held when the tier is opened; 0: not measured")
	fs.IntVar(&migration.Chunks, "migration", 512,
		"chunks of 2M on two devices, of which half move; 0: not measured")
	fs.IntVar(&migration.Run, "run", 128, "chunks that a lookup asks for meanwhile")
	return cmd
}

func constant(n int, v float64) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = v
	}
	return out
}
