package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"lookaside/dax"
	"lookaside/internal/bench"
	"lookaside/internal/bench/diskbench"
	"lookaside/internal/bytesize"
)

func newDisk() *cobra.Command {
	var (
		file, bytes, piece, kind string
		slots                    []string
		o                        diskbench.Transfers
	)
	cmd := &cobra.Command{
		Use:   "disk",
		Short: "The disk tier's reads and writes, against fio's with as large requests, as many at a time, into memory of the same kind",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Bytes, err = bytesize.Parse(bytes); err != nil {
				return fmt.Errorf("--bytes: %w", err)
			}
			if o.Piece, err = bytesize.Parse(piece); err != nil {
				return fmt.Errorf("--piece: %w", err)
			}
			if o.Kind, err = dax.ParseKind(kind); err != nil {
				return fmt.Errorf("--kind: %w", err)
			}
			ctx, stop := interruptible(cmd)
			defer stop()
			report := bench.NewReport("disk")
			for _, slot := range slots {
				if o.SlotBytes, err = bytesize.Parse(slot); err != nil {
					return fmt.Errorf("--slots: %w", err)
				}
				f, err := o.Run(ctx)
				if err != nil {
					return err
				}
				addDisk(report, o.SlotBytes, f)
			}
			return report.Print(cmd.OutOrStdout(), cmd.ErrOrStderr(), file)
		},
	}
	addJSONFlag(cmd, &file)
	fs := cmd.Flags()
	fs.StringVar(&o.Dir, "dir", "",
		"directory on the disk to measure (default: that for temporary files); takes twice --bytes")
	fs.StringSliceVar(&slots, "slots", []string{"1M", "8M", "64M"}, "bytes of a slot")
	fs.StringVar(&bytes, "bytes", "1G", "bytes written and read each round")
	fs.StringVar(&piece, "piece", "4M", "bytes of a request at most")
	fs.IntVar(&o.Workers, "workers", 4, "requests under way at a time")
	fs.StringVar(&kind, "kind", "auto", "kind of the memory: auto, hugetlb, thp or memfd")
	fs.IntVar(&o.Rounds, "rounds", 5, "how often each is measured; the median counts")
	return cmd
}

// coresBudget is how many cores the transfers may keep busy.
const coresBudget = 0.5

func addDisk(r *bench.Report, slot int64, f diskbench.Figures) {
	of := "." + bytesize.Format(slot)
	r.Rounds("read"+of, "GB/s", f.Read, f.FioR)
	r.Rounds("write"+of, "GB/s", f.Write, f.FioW)
	r.Rounds("read.over_bare"+of, "GB/s", f.Read, f.BareR)
	r.Rounds("write.over_bare"+of, "GB/s", f.Write, f.BareW)
	budget := make([]float64, len(f.ReadC))
	for i := range budget {
		budget[i] = coresBudget
	}
	r.Rounds("read.cores"+of, "", f.ReadC, budget)
	r.Rounds("write.cores"+of, "", f.WriteC, budget)
	r.Add("page_cache"+of, f.CachedFraction, "of the bytes")
}

func newRecovery() *cobra.Command {
	var (
		file, page string
		o          diskbench.Recovery
	)
	cmd := &cobra.Command{
		Use:   "recovery",
		Short: "Opening a disk tier that holds many chunks, against reading and hashing its directories",
		Long: `Opening a disk tier that holds many chunks, against reading and hashing its directories and
doing nothing else. The store is made for it, with directories that are there and slots that are
holes.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.PageBytes, err = bytesize.Parse(page); err != nil {
				return fmt.Errorf("--page: %w", err)
			}
			ctx, stop := interruptible(cmd)
			defer stop()
			f, err := o.Run(ctx)
			if err != nil {
				return err
			}
			report := bench.NewReport("recovery")
			of := fmt.Sprintf(".%d_chunks.%d_pages", o.Chunks, o.PagesPerChunk)
			report.Rounds("open"+of, "s", f.Seconds, f.BareS)
			budget, memory := make([]float64, len(f.Seconds)), make([]float64, len(f.Seconds))
			for i := range budget {
				budget[i], memory[i] = 3*float64(o.Chunks)/1e6, 2048
			}
			report.Rounds("open_in_budget"+of, "s", f.Seconds, budget)
			report.Rounds("memory_a_chunk"+of, "B", f.MemoryB, memory)
			report.Add("directory_a_chunk"+of, float64(f.EntryB), "B")
			return report.Print(cmd.OutOrStdout(), cmd.ErrOrStderr(), file)
		},
	}
	addJSONFlag(cmd, &file)
	fs := cmd.Flags()
	fs.StringVar(&o.Dir, "dir", "",
		"directory on the disk to measure (default: that for temporary files)")
	fs.IntVar(&o.Chunks, "chunks", 1_000_000, "chunks held")
	fs.IntVar(&o.PagesPerChunk, "pages-per-chunk", 16, "pages of a chunk")
	fs.StringVar(&page, "page", "256K", "bytes of a page, which takes no room")
	fs.IntVar(&o.Rounds, "rounds", 5, "how often it is measured; the median counts")
	return cmd
}
