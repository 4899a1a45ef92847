package main

import (
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"lookaside/sidecar"
	"lookaside/sidecar/doctor"
	"lookaside/sidecar/settings"
)

// These are the exit codes of lookaside doctor, beside 0 and exitFailure, which says that the
// command itself could not run.
const (
	exitWarnings = 3
	exitErrors   = 4
)

func newDoctor() *cobra.Command {
	var (
		o           doctor.Options
		asJSON, all bool
	)
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say whether it works, whether it helps, and what to do",
		Long: `Look at this host, at each sidecar on it, at each vLLM that is connected or should be, and at what
they have to do with each other; say what is wrong, and what to do about it.

It changes nothing and may run at any time. Of disk tiers it measures the speed with a file without
a name of 16 MiB (--disk-test=false: it does not). What does not answer within --timeout is left
out, and named.

It takes all settings of lookaside serve, as flags, environment or file: where no sidecar runs, it
says whether one would start with them. Sidecars that run are asked themselves.

With --gpu it copies pages between GPU and host memory as vLLM's worker does, and compares the bytes
and the speed with one bare copy of the same buffers. That takes some seconds and 512 MiB of GPU
memory, and needs the Python that vLLM runs with.

Each finding has an id; docs/troubleshooting.md describes all of them. Exit status: 0 nothing is
wrong, 3 there are warnings, 4 there are errors, 1 the command itself failed.`,
		Example: `  lookaside doctor
  lookaside doctor --runtime-dir /run/lookaside/llama-0 --json
  lookaside doctor --arena-limit 64G --disk /mnt/nvme0/kv:800G
  lookaside doctor --gpu --python /opt/vllm/bin/python`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Config, err = settings.Load(cmd.Flags(), os.Environ()); err != nil {
				return err
			}
			o.Named = o.Config.Runtime.Dir != settings.DefaultDir(os.Environ())
			o.Release, o.Environ, o.Root = sidecar.Version, os.Environ(), "/"
			if o.Python == "" {
				o.Python = doctor.FindPython(o.Environ)
			}
			report := doctor.Diagnose(doctor.Gather(cmd.Context(), o))
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), report)
			} else {
				err = report.WriteText(cmd.OutOrStdout(), all)
			}
			switch {
			case err != nil:
				return err
			case report.Worst == doctor.Error:
				return coded{exitErrors, fmt.Errorf("doctor: %s", report.Summary())}
			case report.Worst == doctor.Warning:
				return coded{exitWarnings, fmt.Errorf("doctor: %s", report.Summary())}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false, "print JSON")
	f.BoolVar(&all, "all", false, "also say in full what is as it should be")
	f.DurationVar(&o.Timeout, "timeout", 3*time.Second, "how long each part may take")
	f.BoolVar(&o.DiskTest, "disk-test", true, "measure the speed of disk tiers")
	f.BoolVar(&o.GPU, "gpu", false, "check the copies between GPU and host memory")
	f.StringVar(&o.Python, "python", "",
		"`program` for --gpu: the Python that vLLM runs with (default: that of $VIRTUAL_ENV, or python3)")
	f.StringSliceVar(&o.GPUArgs, "gpu-args", nil, "more `arguments` for python -m lookaside.gpucheck")
	f.DurationVar(&o.GPUTimeout, "gpu-timeout", time.Minute, "how long --gpu may take")
	settings.AddFlags(f)
	// Those that matter to what is looked at; the others are taken as well.
	shown := []string{"config", "runtime-dir", "arena-limit", "arena-kind", "disk"}
	for _, s := range settings.All() {
		if !slices.Contains(shown, s.Flag()) {
			_ = f.MarkHidden(s.Flag())
		}
	}
	return cmd
}
