package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"lookaside/internal/bench"
	"lookaside/internal/bench/promotionbench"
	"lookaside/internal/bytesize"
	"lookaside/sidecar"
	"lookaside/sidecar/settings"
)

func newPromotion() *cobra.Command {
	var (
		file         string
		o            promotionbench.Options
		prefix, page string
		piece        string
	)
	cmd := &cobra.Command{
		Use:   "promotion",
		Short: "Lookup of a prefix that is on disk only, against the time that reading its bytes takes",
		Long: `Lookup of a prefix that is on disk only, over the sidecar's real lookup socket, against the time
that reading as many bytes takes with nothing around it: a loop of reads in pieces of the same
size, as many at a time, around the page cache, into memory of the same kind, in the same run.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, size := range []struct {
				name, value string
				to          *int64
			}{{"prefix", prefix, &o.Bytes}, {"page", page, &o.PageBytes},
				{"piece", piece, &o.PieceBytes}} {
				var err error
				if *size.to, err = bytesize.Parse(size.value); err != nil {
					return fmt.Errorf("--%s: %w", size.name, err)
				}
			}
			ctx, stop := interruptible(cmd)
			defer stop()
			log := sidecar.NewLogger(settings.LogConfig{Level: "warn", Format: "console"},
				os.Stderr)
			f, err := promotionbench.Run(ctx, o, log)
			if err != nil {
				return err
			}
			return promotionReport(f).Print(cmd.OutOrStdout(), cmd.ErrOrStderr(), file)
		},
	}
	addJSONFlag(cmd, &file)
	fs := cmd.Flags()
	fs.StringVar(&o.Dir, "dir", "",
		"directory on the disk to measure (default: that for temporary files); takes three times the prefix")
	fs.StringVar(&prefix, "prefix", "512M", "bytes of the prefix")
	fs.StringVar(&page, "page", "256K", "bytes of a page")
	fs.IntVar(&o.PagesPerChunk, "pages-per-chunk", 16, "pages of a chunk")
	fs.IntVar(&o.Workers, "workers", 4, "reads under way at a time")
	fs.StringVar(&piece, "piece", "4M", "bytes of one read of the loop")
	fs.IntVar(&o.Rounds, "rounds", 9, "how often each is measured; the median counts")
	return cmd
}

func promotionReport(f promotionbench.Figures) *bench.Report {
	r := bench.NewReport("promotion")
	of := "." + bytesize.Format(f.Bytes)
	how := "direct"
	if !f.Direct {
		how = "buffered"
	}
	r.Rounds("lookup_from_disk"+of+"."+string(f.Kind)+"."+how, "s", f.LookupSeconds, f.BareSeconds)
	gb := float64(f.Bytes) / 1e9
	r.Add("from_disk"+of, gb/bench.Quantile(f.LookupSeconds, 0.5), "GB/s")
	r.Add("bare_reads"+of, gb/bench.Quantile(f.BareSeconds, 0.5), "GB/s")
	r.Add("lookup_from_arena"+of, bench.Quantile(f.ArenaSeconds, 0.5)*1e6, "us")
	cores := make([]float64, len(f.CPUSeconds))
	for i, s := range f.CPUSeconds {
		cores[i] = s / f.LookupSeconds[i]
	}
	r.Add("cores_while_promoting"+of, bench.Quantile(cores, 0.5), "")
	return r
}
