package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"lookaside/internal/bench"
	"lookaside/internal/bench/restartbench"
)

func newRestart() *cobra.Command {
	var (
		file string
		o    restartbench.Options
	)
	cmd := &cobra.Command{
		Use:   "restart",
		Short: "Lookups of a sidecar that is killed and started again, and of one that hands over",
		Long: `Lookups of a sidecar that is killed and started again: how long after its start the first one finds
all of its prefix again, against the first lookup of a sidecar that has nothing to find; and the
longest pause between two lookups while one sidecar takes over from another, against the longest
one while nothing happens. Its program is the lookaside command beside this one.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return err
			}
			o.Program, o.Log = filepath.Join(filepath.Dir(self), "lookaside"), os.Stderr
			ctx, stop := interruptible(cmd)
			defer stop()
			f, err := restartbench.Run(ctx, o)
			if err != nil {
				return err
			}
			return restartReport(f).Print(cmd.OutOrStdout(), cmd.ErrOrStderr(), file)
		},
	}
	addJSONFlag(cmd, &file)
	fs := cmd.Flags()
	fs.StringVar(&o.Dir, "dir", memoryDir(),
		"where the sidecar's directory is made; normally it is in memory, as /run is")
	fs.IntVar(&o.Chunks, "chunks", 10_000, "chunks of 16 pages that the arena holds")
	fs.BoolVar(&o.Takeover, "takeover", true, "measure takeovers too")
	fs.IntVar(&o.Rounds, "rounds", 3, "how often each is measured; the median counts")
	return cmd
}

// memoryDir is a directory in memory; "" for that of temporary files.
func memoryDir() string {
	const dir = "/dev/shm"
	if st, err := os.Stat(dir); err == nil && st.IsDir() {
		return dir
	}
	return ""
}

func restartReport(f restartbench.Figures) *bench.Report {
	r := bench.NewReport("restart")
	of := fmt.Sprintf(".%d", f.Chunks)
	r.Rounds("kill.first_lookup"+of, "s", f.KilledSeconds, f.EmptySeconds)
	r.Add("kill.found_again"+of, bench.Quantile(f.FoundShare, 0.5), "")
	r.Add("kill.mapped"+of, bench.Quantile(f.MappedBytes, 0.5), "bytes")
	if len(f.PauseSeconds) == 0 {
		return r
	}
	r.Rounds("takeover.pause"+of, "s", f.PauseSeconds, f.QuietSeconds)
	r.Add("takeover.seconds"+of, bench.Quantile(f.TakeoverSeconds, 0.5), "s")
	r.Add("takeover.missed_lookups"+of, float64(f.Missed), "")
	return r
}
