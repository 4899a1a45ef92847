package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"lookaside/internal/bench"
	"lookaside/internal/bench/peerbench"
)

func newPeers() *cobra.Command {
	var (
		file string
		o    peerbench.Options
	)
	cmd := &cobra.Command{
		Use:   "peers",
		Short: "What sidecars know of each other: joining, memory, changes followed, lookups and leases",
		Long:  `What sidecars know of each other: how long one that joins takes to know all that the others hold, the memory for that, how many changes a second it follows, and how long lookups and leases take. All sidecars are in this process, and have no memory but their books.`,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd)
			defer stop()
			f, err := o.Run(ctx)
			if err != nil {
				return err
			}
			report := bench.NewReport("peers")
			of := fmt.Sprintf(".%d_sidecars.%d_pages", o.Sidecars, o.Pages)
			report.Add("join"+of, bench.Quantile(f.JoinSeconds, 0.5), "s")
			report.Add("memory_a_hint"+of, bench.Quantile(f.BytesPerHint, 0.5), "B")
			report.Add("events_followed"+of, bench.Quantile(f.EventsPerSec, 0.5), "1/s")
			report.Add("contains_4096.p50"+of, bench.Quantile(f.ContainsUs, 0.5), "us")
			report.Add("contains_4096.p50.busy"+of, bench.Quantile(f.ContainsBusyUs, 0.5), "us")
			report.Add("contains_4096.p99.busy"+of, bench.Quantile(f.ContainsBusyUs, 0.99), "us")
			report.Add("lease_256.p50"+of, bench.Quantile(f.LeaseUs, 0.5), "us")
			report.Add("lease_256.p99"+of, bench.Quantile(f.LeaseUs, 0.99), "us")
			return report.Print(cmd.OutOrStdout(), cmd.ErrOrStderr(), file)
		},
	}
	addJSONFlag(cmd, &file)
	fs := cmd.Flags()
	fs.IntVar(&o.Sidecars, "sidecars", 16, "sidecars, the one that joins included")
	fs.IntVar(&o.Pages, "pages", 1_000_000, "pages that each of the others holds")
	fs.IntVar(&o.Rounds, "rounds", 3, "how often one joins; the median counts")
	fs.IntVar(&o.Lookups, "lookups", 200, "lookups and leases each round")
	fs.DurationVar(&o.Events, "events", time.Second,
		"how long changes are followed for at each rate")
	return cmd
}
