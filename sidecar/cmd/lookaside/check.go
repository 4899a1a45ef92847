package main

import (
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/tiers/disk"
)

func newCheck() *cobra.Command {
	var (
		o      disk.CheckOptions
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "check PATH…",
		Short: "Verify a disk tier that no sidecar has open, and drop what is bad",
		Long: `Verify a disk tier that no sidecar has open: every entry of its directories, and the checksum of every page.

PATH is a directory of the tier; name all of them. It exits with 1 if something is bad. With --repair what is bad is dropped: a slab whose
header is damaged is removed, and made anew when the sidecar starts.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := interruptible(cmd)
			defer stop()
			o.Dirs = args
			o.Progress = checkProgress(cmd.ErrOrStderr())
			r, err := disk.Check(ctx, o)
			if o.Progress != nil {
				fmt.Fprint(cmd.ErrOrStderr(), "\r\033[K")
			}
			if err != nil {
				return err
			}
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), r)
			} else {
				err = writeReport(cmd.OutOrStdout(), &r)
			}
			if err == nil && r.Bad() > 0 {
				err = fmt.Errorf("%d things are bad", r.Bad())
				if o.Repair {
					err = fmt.Errorf("%d things were bad; check again to see that the rest is good", r.Bad())
				}
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&o.Repair, "repair", false, "drop what is bad")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// checkProgress prints how far a check is, where somebody sees it; nil elsewhere.
func checkProgress(w io.Writer) func(done, total int64) {
	f, ok := w.(*os.File)
	if !ok {
		return nil
	}
	if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err != nil { // not a terminal
		return nil
	}
	var last time.Time
	return func(done, total int64) {
		if now := time.Now(); now.Sub(last) > 200*time.Millisecond && total > 0 {
			last = now
			fmt.Fprintf(w, "\r\033[K%3d %%  %s of %s", 100*done/total, dax.FormatSize(done), dax.FormatSize(total))
		}
	}
}

func writeReport(w io.Writer, r *disk.Report) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "SLAB\tSIZE\tCHUNKS\tPAGES\tDAMAGED\tCORRUPT\tUNREADABLE\tDROPPED\t")
	for i := range r.Slabs {
		s := &r.Slabs[i]
		what := s.Error
		if s.Removed {
			what += " (removed)"
		}
		if s.Error == "" && s.Geometry == nil {
			what = "not in use"
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%s\n", s.File, dax.FormatSize(s.Bytes), s.Chunks, s.Pages, s.DamagedEntries, s.CorruptChunks,
			s.UnreadableChunks, s.Dropped, what)
	}
	return t.Flush()
}
