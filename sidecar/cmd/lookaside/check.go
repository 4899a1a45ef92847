package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"lookaside/internal/bytesize"
	"lookaside/tiers/daxtier"
	"lookaside/tiers/slab"
)

func newCheck() *cobra.Command {
	var (
		o      slab.CheckOptions
		offset string
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "check PATH…",
		Short: "Verify a tier on disks or DAX devices that no sidecar has open, and drop what is bad",
		Long: `Verify a tier on disks or DAX devices that no sidecar has open: every entry of its directories,
and the checksum of every page.

PATH is a directory of the tier, or a DAX device or file of it; name all of them. Of a device
all partitions are checked that lie one behind the other, as those of several ranks do. It exits
with 1 if something is bad. With --repair what is bad is dropped: a slab whose header is damaged
is removed, and made anew when the sidecar starts.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := interruptible(cmd)
			defer stop()
			o.Progress = checkProgress(cmd.ErrOrStderr())
			r, err := checkPaths(ctx, args, offset, o)
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
					err = fmt.Errorf("%d things were bad; check again to see that the rest is good",
						r.Bad())
				}
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&o.Repair, "repair", false, "drop what is bad")
	cmd.Flags().StringVar(&offset, "offset", "0",
		"where on DAX devices the first partition begins, in bytes")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// checkPaths checks directories, or devices: a tier is on one or the other.
func checkPaths(ctx context.Context, paths []string, offset string,
	o slab.CheckOptions) (slab.Report, error) {
	at, err := bytesize.Parse(offset)
	if err != nil {
		return slab.Report{}, fmt.Errorf("--offset: %w", err)
	}
	var dirs, devices []string
	for _, p := range paths {
		info, err := os.Stat(p)
		switch {
		case err != nil:
			return slab.Report{}, err
		case info.IsDir():
			dirs = append(dirs, p)
		case info.Mode().IsRegular() || info.Mode()&os.ModeCharDevice != 0:
			devices = append(devices, p)
		default:
			return slab.Report{}, fmt.Errorf(
				"%s is neither a directory nor a DAX device or file: name a tier's directories, or its devices", p)
		}
	}
	if len(dirs) > 0 && len(devices) > 0 {
		return slab.Report{}, fmt.Errorf("%s is a directory and %s is not: check a tier at a time",
			dirs[0], devices[0])
	}
	if len(devices) > 0 {
		return daxtier.Check(ctx, daxtier.CheckOptions{Devices: devices, OffsetBytes: at,
			Repair: o.Repair, Progress: o.Progress})
	}
	o.Dirs = dirs
	return slab.Check(ctx, o)
}

// checkProgress returns a function that prints the progress of a check, or nil if w is not a
// terminal.
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
			fmt.Fprintf(w, "\r\033[K%3d %%  %s of %s", 100*done/total, bytesize.Format(done),
				bytesize.Format(total))
		}
	}
}

func writeReport(w io.Writer, r *slab.Report) error {
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
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%s\n", s.File, bytesize.Format(s.Bytes),
			s.Chunks, s.Pages, s.DamagedEntries, s.CorruptChunks,
			s.UnreadableChunks, s.Dropped, what)
	}
	return t.Flush()
}

// interruptible returns a context that ends with the first Ctrl-C or SIGTERM. The next one ends the
// process.
func interruptible(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}
