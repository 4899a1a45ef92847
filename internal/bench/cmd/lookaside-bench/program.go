package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"lookaside/internal/bench"
	"lookaside/internal/bench/programbench"
	"lookaside/internal/bytesize"
	"lookaside/tiers/elsewhere"
)

func newProgram() *cobra.Command {
	var (
		file, bytes, command string
		chunks               []string
		o                    programbench.Options
	)
	cmd := &cobra.Command{
		Use:   "elsewhere",
		Short: "Chunks to a program that is a tier and back, against a bare loop of copies",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Bytes, err = bytesize.Parse(bytes); err != nil {
				return fmt.Errorf("--bytes: %w", err)
			}
			if o.Command, err = elsewhere.Words(command); err != nil {
				return fmt.Errorf("--program: %w", err)
			}
			ctx, stop := interruptible(cmd)
			defer stop()
			report := bench.NewReport("elsewhere")
			for _, c := range chunks {
				if o.ChunkBytes, err = bytesize.Parse(c); err != nil {
					return fmt.Errorf("--chunks: %w", err)
				}
				f, err := o.Run(ctx)
				if err != nil {
					return err
				}
				report.Rounds("put."+bytesize.Format(o.ChunkBytes), "GB/s", f.Put, f.BarePut)
				report.Rounds("get."+bytesize.Format(o.ChunkBytes), "GB/s", f.Get, f.BareGet)
			}
			return report.Print(cmd.OutOrStdout(), cmd.ErrOrStderr(), file)
		},
	}
	addJSONFlag(cmd, &file)
	fs := cmd.Flags()
	fs.StringVar(&command, "program",
		".venv/bin/python examples/tier_program/memory_store.py --capacity 1G",
		"`command` that starts the program")
	fs.StringSliceVar(&chunks, "chunks", []string{"1M", "8M"}, "bytes of a chunk")
	fs.StringVar(&bytes, "bytes", "256M", "bytes moved each way and round")
	fs.IntVar(&o.Concurrency, "concurrency", 2, "calls at a time")
	fs.IntVar(&o.Batch, "batch", 8, "chunks of one call")
	fs.BoolVar(&o.Isolated, "isolate", false, "the program does not map the arena")
	fs.IntVar(&o.Rounds, "rounds", 5, "how often each is measured; the median counts")
	return cmd
}
