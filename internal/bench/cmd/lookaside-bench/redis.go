package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"lookaside/internal/bench"
	"lookaside/internal/bench/redisbench"
	"lookaside/internal/bytesize"
)

func newRedis() *cobra.Command {
	var (
		file, bytes, split string
		chunks             []string
		o                  redisbench.Options
	)
	cmd := &cobra.Command{
		Use:   "redis",
		Short: "Chunks to a Redis server and back, against a bare loop of the same client with the same values",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Bytes, err = bytesize.Parse(bytes); err != nil {
				return fmt.Errorf("--bytes: %w", err)
			}
			if o.Split, err = bytesize.Parse(split); err != nil {
				return fmt.Errorf("--split: %w", err)
			}
			ctx, stop := interruptible(cmd)
			defer stop()
			if o.Server == "" {
				addr, end, err := redisbench.Server(ctx)
				if err != nil {
					return err
				}
				defer end()
				o.Server = addr
			}
			report := bench.NewReport("redis")
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
	fs.StringVar(&o.Server, "server", "",
		"`host:port` of a server without a password (default: a redis-server is started)")
	fs.StringSliceVar(&chunks, "chunks", []string{"1M", "8M", "32M"}, "bytes of a chunk")
	fs.StringVar(&bytes, "bytes", "512M", "bytes moved each way and round")
	fs.IntVar(&o.Concurrency, "concurrency", 2, "calls at a time")
	fs.IntVar(&o.Batch, "batch", 4, "chunks of one call")
	fs.StringVar(&split, "split", "8M", "bytes of one value at most")
	fs.StringVar(&o.Serde, "serde", "raw", "codec")
	fs.IntVar(&o.Rounds, "rounds", 7, "how often each is measured; the median counts")
	return cmd
}
