package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"lookaside/sidecar/admin"
)

// A daxControl is shared by the commands for DAX devices.
type daxControl struct {
	control
	adapter int
	arena   bool
	quiet   bool
}

func (c *daxControl) flags(cmd *cobra.Command) {
	cmd.Flags().IntVar(&c.adapter, "adapter", -1,
		"`number` of the tier of DAX devices, if there are several; default: the one that has the device, or the first")
	arenaFlag(cmd, &c.arena)
	cmd.MarkFlagsMutuallyExclusive("arena", "adapter")
	cmd.Flags().BoolVar(&c.quiet, "quiet", false, "show no progress")
	c.control.flags(cmd)
}

// arenaFlag adds the flag that selects the arena's devices.
func arenaFlag(cmd *cobra.Command, arena *bool) {
	cmd.Flags().BoolVar(arena, "arena", false, "the devices of the arena, and not those of a tier")
}

// target returns the device's part of a request.
func (c *daxControl) target(device string) admin.DAXTarget {
	t := admin.DAXTarget{DevicePath: device}
	if c.adapter >= 0 {
		t.AdapterIndex = &c.adapter
	}
	return t
}

func newDAX() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "dax",
		Short: "Show, add, remove and resize the DAX devices of a running sidecar",
		Long: `Show, add, remove and resize the DAX devices of a running sidecar, while it serves: those of its
tiers or, with --arena, those that its arena lies on. Changes are refused unless the tier has
hotplug: true, or arena.dax.hotplug is. They last as long as the sidecar: change its settings too.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newDAXStatus(), newDAXAdd(), newDAXRemove(), newDAXResize())
	return cmd
}

func newDAXStatus() *cobra.Command {
	var (
		c     control
		arena bool
	)
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the devices: state, use, slots, and what is under way",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.client(cmd)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Second)
			defer cancel()
			if arena {
				var st admin.DAXArenasResult
				if err := client.Get(ctx, arenaPath+"status", &st); err != nil {
					return err
				}
				return c.print(cmd, st, st.WriteTable)
			}
			var st admin.DAXStatus
			if err := client.Get(ctx, daxPath+"status", &st); err != nil {
				return err
			}
			return c.print(cmd, st, st.WriteTable)
		},
	}
	arenaFlag(cmd, &arena)
	c.flags(cmd)
	return cmd
}

func newDAXAdd() *cobra.Command {
	var c daxControl
	cmd := &cobra.Command{
		Use:     "add DEVICE SIZE",
		Short:   "Add a device to a tier or the arena; chunks are written to it from then on",
		Example: "  lookaside dax add /dev/dax1.0 100G\n  lookaside dax add --arena /dev/dax2.0 100G",
		Args:    exactly("a device and how much of it to use", 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if c.arena {
				return c.changeArena(cmd, "add", args[0],
					admin.DAXArenaAddRequest{DevicePath: args[0], Size: admin.DAXSize(args[1])})
			}
			return c.change(cmd, "add", args[0], admin.DAXAddRequest{DAXTarget: c.target(args[0]),
				Size: admin.DAXSize(args[1])})
		},
	}
	c.flags(cmd)
	return cmd
}

func newDAXRemove() *cobra.Command {
	var (
		c     daxControl
		mode  string
		force bool
	)
	cmd := &cobra.Command{
		Use:   "remove DEVICE",
		Short: "Remove a device from a tier or the arena: move its chunks away, drop them, or only write no more",
		Long: `Remove a device from a tier while it serves.

  --mode migrate   moves its chunks to the other devices; each can be read at every moment. Without room for all of them nothing is moved.
  --mode evict     drops its chunks.
  --mode drain     writes nothing new to it. What is there can be read; the device stays until it is removed with another mode. Of the arena (--arena),
                   where this is the default, it goes by itself: in the background its chunks are moved to the other devices, or dropped where there
                   is no room for them, as soon as nobody has a lease on them. Adding it again takes it into use again.

Chunks that are being loaded are refused, unless --force: then these loads are waited for. In
the arena lookups and pins have leases as well. Ctrl-C stops: what was moved is moved, and the
device stays.`,
		Example: "  lookaside dax remove /dev/dax1.0\n  lookaside dax remove /dev/dax1.0 --mode evict --force\n  lookaside dax remove --arena /dev/dax2.0",
		Args:    exactly("one device", 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if c.arena {
				return c.changeArena(cmd, "remove", args[0],
					admin.DAXArenaRemoveRequest{DevicePath: args[0], Mode: cmp.Or(mode, "drain"),
						Force: force})
			}
			mode = cmp.Or(mode, "migrate")
			return c.change(cmd, "remove", args[0],
				admin.DAXRemoveRequest{DAXTarget: c.target(args[0]), Mode: mode, Force: force})
		},
	}
	cmd.Flags().StringVar(&mode, "mode", "",
		"what becomes of its chunks: `migrate`, evict or drain; default: migrate, and drain with --arena")
	cmd.Flags().BoolVar(&force, "force", false, "wait for those who read its chunks")
	c.flags(cmd)
	return cmd
}

func newDAXResize() *cobra.Command {
	var (
		c     daxControl
		mode  string
		force bool
	)
	cmd := &cobra.Command{
		Use:   "resize DEVICE SIZE",
		Short: "Use more or less of a device",
		Long: `Use more or less of a device while its tier, or the arena, serves. Growing moves nothing. When
it shrinks, chunks that lie beyond the new size are moved (--mode migrate) or dropped (--mode
evict).

Chunks that are being loaded are refused, unless --force: then these loads are waited for.
Ctrl-C stops: what was moved is moved, and the size stays.`,
		Example: "  lookaside dax resize /dev/dax1.0 200G\n  lookaside dax resize --arena /dev/dax2.0 200G",
		Args:    exactly("a device and its new size", 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if c.arena {
				return c.changeArena(cmd, "resize", args[0],
					admin.DAXArenaResizeRequest{DevicePath: args[0],
						Size: admin.DAXSize(args[1]), Mode: mode, Force: force})
			}
			return c.change(cmd, "resize", args[0],
				admin.DAXResizeRequest{DAXTarget: c.target(args[0]),
					Size: admin.DAXSize(args[1]), Mode: mode, Force: force})
		},
	}
	cmd.Flags().StringVar(&mode, "mode", "migrate",
		"what becomes of chunks beyond the new size: `migrate` or evict")
	cmd.Flags().BoolVar(&force, "force", false, "wait for those who read these chunks")
	c.flags(cmd)
	return cmd
}

// These are the sidecar's routes for changes of devices: of tiers, and of the arena.
const (
	daxPath         = "/reconfigure/dax/"
	arenaPath       = daxPath + "l1/"
	arenaChangePath = "/v1/dax/arena/" // LMCache has no such route
)

// exactly returns a check for a fixed number of arguments.
func exactly(what string, n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return fmt.Errorf("give %s: %s", what, cmd.UseLine())
		}
		return nil
	}
}

// progressEvery is the interval of requests for the progress of a change.
const progressEvery = 500 * time.Millisecond

// change changes a tier's device and shows the result.
func (c *daxControl) change(cmd *cobra.Command, operation, device string, request any) error {
	var result admin.DAXResult
	if err := c.ask(cmd, daxPath+operation, device, request, &result); err != nil {
		return err
	}
	return c.print(cmd, result, func(w io.Writer) error { return showDAXResult(w, result) })
}

// changeArena changes a device of the arena and shows the result.
func (c *daxControl) changeArena(cmd *cobra.Command, operation, device string, request any) error {
	show := func(answer any, line string) error {
		return c.print(cmd, answer, func(w io.Writer) error {
			_, err := fmt.Fprintln(w, line)
			return err
		})
	}
	switch operation {
	case "add":
		var r admin.DAXArenaAddResult
		if err := c.ask(cmd, arenaPath+operation, device, request, &r); err != nil {
			return err
		}
		return show(r, fmt.Sprintf("%s: %s", r.Added.DevicePath, r.Added.State))
	case "resize":
		var r admin.DAXArenaResizeResult
		if err := c.ask(cmd, arenaChangePath+operation, device, request, &r); err != nil {
			return err
		}
		return show(r, fmt.Sprintf("%s: %s: in %s", r.Resized.DevicePath, r.Resized.State,
			took(r.Seconds)))
	}
	var r admin.DAXArenaRemoveResult
	if err := c.ask(cmd, arenaChangePath+operation, device, request, &r); err != nil {
		return err
	}
	state := "removed"
	for _, a := range r.Removed.Arenas {
		state = a.State
	}
	if state != "removed" {
		return show(r, fmt.Sprintf(
			"%s: %s: it goes once it is empty (see lookaside dax status --arena)",
			r.Removed.DevicePath, state))
	}
	return c.print(cmd, r, func(w io.Writer) error {
		return showDAXResult(w, admin.DAXResult{DevicePath: r.Removed.DevicePath, State: state,
			MovedKeys: r.Removed.MovedKeys, DeletedKeys: r.Removed.DeletedKeys,
			Seconds: r.Removed.Seconds})
	})
}

// ask posts a request, shows the sidecar's progress, and decodes the response. An interrupt ends
// it.
func (c *daxControl) ask(cmd *cobra.Command, path, device string, request, answer any) error {
	client, err := c.client(cmd)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- client.Post(ctx, path, request, answer) }()
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	shown := ""
	for err = errUnderWay; errors.Is(err, errUnderWay); {
		select {
		case err = <-done:
		case <-tick.C:
			if line := c.progress(ctx, client, device); !c.quiet && line != "" && line != shown {
				shown = line
				fmt.Fprintln(cmd.ErrOrStderr(), line)
			}
		}
	}
	if ctx.Err() != nil && cmd.Context().Err() == nil {
		whose := "its tier"
		if c.arena {
			whose = "the arena"
		}
		return fmt.Errorf("stopped: %s is still a device of %s, and what had been moved by then is moved (see lookaside dax status)", device, whose)
	}
	return err
}

// errUnderWay means that there is no response yet.
var errUnderWay = errors.New("under way")

// progress returns how far the change of a device is, or "" if that is unknown.
func (c *daxControl) progress(ctx context.Context, client *admin.Client, device string) string {
	ctx, cancel := context.WithTimeout(ctx, progressEvery)
	defer cancel()
	say := func(path, state string, p admin.DAXProgress) string {
		if filepath.Clean(path) != filepath.Clean(device) || p.Total == 0 || state == "active" {
			return ""
		}
		return fmt.Sprintf("%s: %s, %d of %d chunks (%d %%)", path, state, p.Moved, p.Total,
			100*p.Moved/p.Total)
	}
	line := ""
	if c.arena {
		var st admin.DAXArenasResult
		if client.Get(ctx, arenaPath+"status", &st) == nil {
			for _, d := range st.Arenas {
				line += say(d.DevicePath, d.State, d.Progress)
			}
		}
		return line
	}
	var st admin.DAXStatus
	if client.Get(ctx, daxPath+"status", &st) != nil {
		return ""
	}
	for _, d := range st.Devices {
		line += say(d.DevicePath, d.State, d.Progress)
	}
	return line
}

func showDAXResult(w io.Writer, r admin.DAXResult) error {
	var more []string
	if r.MovedKeys != nil && *r.MovedKeys > 0 {
		more = append(more, fmt.Sprintf("%d chunks moved", *r.MovedKeys))
	}
	if r.DeletedKeys != nil && *r.DeletedKeys > 0 {
		more = append(more, fmt.Sprintf("%d chunks dropped", *r.DeletedKeys))
	}
	more = append(more, "in "+took(r.Seconds).String())
	_, err := fmt.Fprintf(w, "%s: %s: %s\n", r.DevicePath, r.State, strings.Join(more, ", "))
	return err
}
