package admin

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"go.uber.org/zap"

	"lookaside/internal/bytesize"
	"lookaside/tiers/daxtier"
)

// DAXArenaAddRequest is the body of POST /reconfigure/dax/l1/add.
type DAXArenaAddRequest struct {
	DevicePath string  `json:"device_path" doc:"The device."`
	Size       DAXSize `json:"size" doc:"How much of it to use: bytes, or a size such as \"100GiB\" (powers of 1024)."`
}

// DAXArenaDrainRequest is the body of POST /reconfigure/dax/l1/remove. Like LMCache's, it has no
// other mode.
type DAXArenaDrainRequest struct {
	DevicePath string `json:"device_path" doc:"The device."`
	Mode       string `json:"mode,omitempty" enum:"drain" default:"drain" doc:"What becomes of its chunks: nothing new is written to it, and in the background it is emptied and removed. POST /v1/dax/arena/remove has other modes."`
}

// DAXArenaRemoveRequest is the body of POST /v1/dax/arena/remove.
type DAXArenaRemoveRequest struct {
	DevicePath string `json:"device_path" doc:"The device."`
	Mode       string `json:"mode,omitempty" enum:"drain,migrate,evict" default:"drain" doc:"What becomes of its chunks. drain: nothing new is written to it, and the answer is there at once; what is there can be read, and in the background it is moved to the other devices, or dropped where there is no room for it, as soon as nobody has a lease on it; then workers unmap the device, and it is gone. migrate: they are moved to the other devices before the answer; without room for all of them nothing is removed. evict: they are dropped before the answer."`
	Force      bool   `json:"force,omitempty" doc:"With migrate and evict: wait for those who have leases on its chunks; otherwise they make the answer 409."`
}

// DAXArenaResizeRequest is the body of POST /v1/dax/arena/resize.
type DAXArenaResizeRequest struct {
	DevicePath string  `json:"device_path" doc:"The device."`
	Size       DAXSize `json:"size" doc:"How much of it to use from now on: bytes, or a size such as \"100GiB\" (powers of 1024)."`
	Mode       string  `json:"mode,omitempty" enum:"migrate,evict" default:"migrate" doc:"What becomes of chunks that lie beyond the new size."`
	Force      bool    `json:"force,omitempty" doc:"Wait for those who have leases on these chunks; otherwise they make the answer 409."`
}

// DAXArena is one device of the arena. LMCache has all fields except the last three.
type DAXArena struct {
	DevicePath        string      `json:"device_path" doc:"The device."`
	SizeInBytes       int64       `json:"size_in_bytes" doc:"What is used of it."`
	UsedBytes         int64       `json:"used_bytes" doc:"Of this, what chunks take."`
	FreeBytes         int64       `json:"free_bytes" doc:"Of this, what chunks may still take."`
	ActiveAllocations int64       `json:"active_allocations" doc:"Slots that have a chunk, or are being filled."`
	State             string      `json:"state" doc:"active, draining, migrating, removing or removed."`
	IsPrimary         bool        `json:"is_primary" doc:"Whether it cannot be removed, being the only one that is written to."`
	CapacityBytes     int64       `json:"capacity_bytes" doc:"Of size_in_bytes, what is for chunks."`
	Slots             DAXSlots    `json:"slots" doc:"The slots for chunks, as far as they have been cut."`
	Progress          DAXProgress `json:"progress" doc:"How far the last migration from it is."`
}

// DAXArenasResult is the response of GET /reconfigure/dax/l1/status.
type DAXArenasResult struct {
	Arenas []DAXArena `json:"arenas" doc:"The arena's devices."`
}

// DAXArenaAddResult is the response of POST /reconfigure/dax/l1/add.
type DAXArenaAddResult struct {
	Added DAXArena `json:"added" doc:"The device."`
}

// DAXArenaRemoved is a device that was removed from the arena, or is being removed.
type DAXArenaRemoved struct {
	DevicePath  string     `json:"device_path" doc:"The device."`
	Arenas      []DAXArena `json:"arenas" doc:"What it is now; or was, if its state is removed."`
	MovedKeys   *int64     `json:"moved_keys,omitempty" doc:"With migrate: chunks that it had when they began to be moved away."`
	DeletedKeys *int64     `json:"deleted_keys,omitempty" doc:"With evict: chunks that it had when they began to be dropped."`
	Seconds     float64    `json:"seconds" doc:"How long it took."`
}

// DAXArenaRemoveResult is the response of both requests to remove a device.
type DAXArenaRemoveResult struct {
	Removed DAXArenaRemoved `json:"removed" doc:"What is gone, or is going."`
}

// DAXArenaResizeResult is the response of POST /v1/dax/arena/resize.
type DAXArenaResizeResult struct {
	Resized      DAXArena `json:"resized" doc:"The device."`
	OldSizeBytes int64    `json:"old_size_bytes" doc:"What was used of it before."`
	NewSizeBytes int64    `json:"new_size_bytes" doc:"What was asked for."`
	Seconds      float64  `json:"seconds" doc:"How long it took."`
}

// daxArenas converts a pool's devices to those of an arena.
func daxArenas(st daxtier.Status) []DAXArena {
	out := []DAXArena{}
	for _, dev := range st.Devices {
		slots := daxSlots(&dev)
		out = append(out, DAXArena{
			DevicePath: dev.Path, SizeInBytes: dev.SizeBytes, UsedBytes: dev.UsedBytes,
			FreeBytes: dev.CapacityBytes - dev.UsedBytes, ActiveAllocations: slots.Used,
			State: string(dev.State), IsPrimary: !othersActive(st, dev.Path),
			CapacityBytes: dev.CapacityBytes, Slots: slots, Progress: DAXProgress{Moved: dev.Moved,
				Total: dev.Total},
		})
	}
	return out
}

// othersActive reports whether another device than the one at path is written to.
func othersActive(st daxtier.Status, path string) bool {
	return slices.ContainsFunc(st.Devices,
		func(d daxtier.DeviceStatus) bool { return d.Path != path && d.State == "active" })
}

func (o *Operations) arenaDevice(path string) *DAXArena {
	path = filepath.Clean(path)
	list := daxArenas(o.DAX.Devices())
	if i := slices.IndexFunc(list, func(a DAXArena) bool { return a.DevicePath == path }); i >= 0 {
		return &list[i]
	}
	return nil
}

// notOnDAX returns an error unless the arena is on DAX.
func (o *Operations) notOnDAX() error {
	return apiError(http.StatusConflict,
		"the devices of tiers are below /reconfigure/dax/l2; arena.kind: dax puts the arena on devices", "the arena is not on DAX, but of kind %s", o.Settings.Arena.Kind)
}

// DAXArenas lists the devices of the arena.
func (o *Operations) DAXArenas() (DAXArenasResult, error) {
	if o.DAX == nil {
		return DAXArenasResult{}, o.notOnDAX()
	}
	return DAXArenasResult{daxArenas(o.DAX.Devices())}, nil
}

// changeArena begins a change of the arena's devices. The caller must call done.
func (o *Operations) changeArena(path string) (done func(), err error) {
	switch err := checkDevicePath(path); {
	case o.DAX == nil:
		return nil, o.notOnDAX()
	case err != nil:
		return nil, err
	case !o.Settings.Arena.DAX.HotPlug:
		return nil, apiError(http.StatusForbidden,
			"set arena.dax.hotplug: true in the settings, and restart the sidecar: what is on the devices is found again", "the arena does not allow its devices to be changed while it serves")
	}
	return o.DAX.Change(), nil
}

// DAXArenaAdd adds a device to the arena, or ends the drain of one.
func (o *Operations) DAXArenaAdd(ctx context.Context, r DAXArenaAddRequest) (DAXArenaAddResult,
	error) {
	done, err := o.changeArena(r.DevicePath)
	if err != nil {
		return DAXArenaAddResult{}, err
	}
	defer done()
	size, err := r.Size.bytes()
	if err != nil {
		return DAXArenaAddResult{}, err
	}
	if err := o.DAX.Add(ctx, r.DevicePath, size); err != nil {
		return DAXArenaAddResult{}, daxError(ctx, ofArena, r.DevicePath, err)
	}
	o.Log.Info("DAX device added to the arena: put it into the settings if it is to be there after a restart", zap.String("device", r.DevicePath), zap.String("size", bytesize.Format(size)))
	if a := o.arenaDevice(r.DevicePath); a != nil {
		return DAXArenaAddResult{*a}, nil
	}
	// it has just been removed
	return DAXArenaAddResult{DAXArena{DevicePath: r.DevicePath, State: "removed"}}, nil
}

// DAXArenaRemove removes a device from the arena, or starts to remove it.
func (o *Operations) DAXArenaRemove(ctx context.Context,
	r DAXArenaRemoveRequest) (out DAXArenaRemoveResult, err error) {
	start := time.Now()
	done, err := o.changeArena(r.DevicePath)
	if err != nil {
		return out, err
	}
	defer done()
	before := o.arenaDevice(r.DevicePath)
	if before != nil && before.IsPrimary {
		return out, apiError(http.StatusConflict,
			"add another one first (POST /reconfigure/dax/l1/add)",
			"%s is the only device of the arena that is written to", before.DevicePath)
	}
	if err := o.DAX.Remove(ctx, r.DevicePath, daxtier.Mode(r.Mode), r.Force); err != nil {
		return out, daxError(ctx, ofArena, r.DevicePath, err)
	}
	now := o.arenaDevice(r.DevicePath)
	if now == nil && before != nil {
		now = before
		now.State = "removed"
	}
	if now == nil {
		now = &DAXArena{DevicePath: r.DevicePath, State: "removed"}
	}
	out.Removed = DAXArenaRemoved{DevicePath: now.DevicePath, Arenas: []DAXArena{*now},
		Seconds: time.Since(start).Seconds()}
	if before != nil {
		switch daxtier.Mode(r.Mode) {
		case daxtier.Migrate:
			out.Removed.MovedKeys = &before.Slots.Used
		case daxtier.Evict:
			out.Removed.DeletedKeys = &before.Slots.Used
		}
	}
	what := "DAX device removed from the arena: take it out of the settings too"
	if r.Mode == string(daxtier.Drain) {
		what = "DAX device of the arena is drained: nothing new is written to it, and it is removed once it is empty"
	}
	o.Log.Info(what, zap.String("device", r.DevicePath), zap.String("mode", r.Mode),
		zap.Duration("took", time.Since(start)))
	return out, nil
}

// DAXArenaResize changes how much of a device of the arena is used.
func (o *Operations) DAXArenaResize(ctx context.Context,
	r DAXArenaResizeRequest) (out DAXArenaResizeResult, err error) {
	start := time.Now()
	done, err := o.changeArena(r.DevicePath)
	if err != nil {
		return out, err
	}
	defer done()
	size, err := r.Size.bytes()
	if err != nil {
		return out, err
	}
	before := o.arenaDevice(r.DevicePath)
	if err := o.DAX.Resize(ctx, r.DevicePath, size, daxtier.Mode(r.Mode),
		r.Force); err != nil {
		return out, daxError(ctx, ofArena, r.DevicePath, err)
	}
	out.NewSizeBytes, out.Resized = size, DAXArena{DevicePath: r.DevicePath, State: "removed"}
	if before != nil {
		out.OldSizeBytes = before.SizeInBytes
	}
	if now := o.arenaDevice(r.DevicePath); now != nil {
		out.Resized = *now
	}
	out.Seconds = time.Since(start).Seconds()
	o.Log.Info("DAX device of the arena resized: change it in the settings too",
		zap.String("device", r.DevicePath), zap.String("size", bytesize.Format(size)),
		zap.Duration("took", time.Since(start)))
	return out, nil
}

// registerDAXArena adds the routes for the arena's devices.
func (a *api) registerDAXArena() {
	huma.Register(a, a.get("/reconfigure/dax/l1/status", "dax-l1-status",
		"The DAX devices of the arena; 409 if it is not made of any"),
		func(context.Context, *struct{}) (*output[DAXArenasResult], error) {
			out, err := a.o.DAXArenas()
			if err != nil {
				return nil, err
			}
			return &output[DAXArenasResult]{out}, nil
		})
	registerChange(a, a.post("/reconfigure/dax/l1/add", "dax-l1-add",
		"Add a DAX device to the arena, or take one that is drained into use again"), a.o.DAXArenaAdd)
	registerChange(a, a.post("/reconfigure/dax/l1/remove", "dax-l1-remove",
		"Remove a DAX device from the arena in the background, as soon as nobody reads it"),
		func(ctx context.Context, r DAXArenaDrainRequest) (DAXArenaRemoveResult, error) {
			return a.o.DAXArenaRemove(ctx, DAXArenaRemoveRequest{DevicePath: r.DevicePath,
				Mode: r.Mode})
		})
	// LMCache has no such routes.
	registerChange(a, a.post("/v1/dax/arena/remove", "dax-arena-remove",
		"Remove a DAX device from the arena: in the background, or at once"), a.o.DAXArenaRemove)
	registerChange(a, a.post("/v1/dax/arena/resize", "dax-arena-resize",
		"Use more or less of a DAX device of the arena"), a.o.DAXArenaResize)
}

// WriteTable writes the arena's devices for people.
func (r DAXArenasResult) WriteTable(w io.Writer) error {
	if len(r.Arenas) == 0 {
		_, err := fmt.Fprintln(w, "the arena has no devices yet (see lookaside dax add --arena)")
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	writeArenaDevices(tw, r.Arenas)
	return tw.Flush()
}

func writeArenaDevices(tw io.Writer, list []DAXArena) {
	fmt.Fprintln(tw, "ARENA DEVICE\tSTATE\tUSED\tSLOTS\tFREE\tLEASED\tDRAINING\tPROGRESS")
	for _, a := range list {
		progress := "-"
		if a.Progress.Total > 0 {
			progress = fmt.Sprintf("%d of %d", a.Progress.Moved, a.Progress.Total)
		}
		fmt.Fprintf(tw, "%s\t%s\t%s of %s\t%d\t%d\t%d\t%d\t%s\n", a.DevicePath, a.State,
			bytesize.Format(a.UsedBytes), bytesize.Format(a.CapacityBytes),
			a.Slots.Used, a.Slots.Free, a.Slots.Leased, a.Slots.Draining, progress)
	}
}
