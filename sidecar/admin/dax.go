package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/tiers"
	"lookaside/tiers/daxtier"
)

// A DevicePool has devices that can be added and removed while it serves. *daxtier.Pool is one. Any
// goroutine may call its methods.
type DevicePool interface {
	Status() daxtier.Status
	Add(ctx context.Context, path string, sizeBytes int64) error
	Remove(ctx context.Context, path string, mode daxtier.Mode, force bool) error
	Resize(ctx context.Context, path string, sizeBytes int64, mode daxtier.Mode, force bool) error
}

var _ DevicePool = (*daxtier.Pool)(nil)

// An Adapter is a tier of DAX devices, in LMCache's word.
type Adapter struct {
	Tier    string // its name
	HotPlug bool
	Ranks   int // sidecars that share its devices; a size in a request is for all of them together
	DevicePool
}

// A DAXSize is a number of bytes, or a size with a unit.
type DAXSize string

// UnmarshalJSON accepts a whole number or a string. bytes checks the size.
func (s *DAXSize) UnmarshalJSON(b []byte) error {
	text := string(b)
	if len(b) > 0 && b[0] == '"' {
		if err := json.Unmarshal(b, &text); err != nil {
			return err
		}
	} else if strings.ContainsAny(text, ".eE") {
		return errors.New("size: want a whole number of bytes, or a string")
	}
	*s = DAXSize(text)
	return nil
}

// Schema implements huma.SchemaProvider.
func (DAXSize) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{
		OneOf:    []*huma.Schema{{Type: huma.TypeInteger}, {Type: huma.TypeString}},
		Examples: []any{"100GiB", 107374182400},
	}
}

// bytes parses the size. Like LMCache, it also takes GB and similar units as powers of 1024.
func (s DAXSize) bytes() (int64, error) {
	text := strings.ToLower(strings.TrimSpace(string(s)))
	for _, unit := range []string{"kb", "mb", "gb", "tb"} {
		if number, ok := strings.CutSuffix(text, unit); ok {
			text = number + unit[:1]
		}
	}
	n, err := bytesize.Parse(text)
	if err != nil || n <= 0 {
		return 0, apiError(http.StatusBadRequest,
			`give a number of bytes above 0, or a size such as "100GiB"`,
			"size: %.64q is not a size", string(s))
	}
	return n, nil
}

// A DAXTarget names a tier.
type DAXTarget struct {
	AdapterIndex *int   `json:"adapter_index,omitempty" doc:"Which of the tiers of DAX devices, from 0, as the status lists them. Left out: the one that has the device, or the first."`
	DevicePath   string `json:"device_path" doc:"The device."`
}

// DAXAddRequest is the body of POST /reconfigure/dax/add.
type DAXAddRequest struct {
	DAXTarget
	Size DAXSize `json:"size" doc:"How much of the device to use: bytes, or a size such as \"100GiB\" (powers of 1024)."`
}

// DAXRemoveRequest is the body of POST /reconfigure/dax/remove.
type DAXRemoveRequest struct {
	DAXTarget
	Mode  string `json:"mode,omitempty" enum:"migrate,evict,drain" default:"migrate" doc:"What becomes of its chunks. migrate: they are moved to the other devices. evict: they are dropped. drain: they stay, and can be read until they are evicted or the device is removed; nothing new is written."`
	Force bool   `json:"force,omitempty" doc:"Wait for loads of its chunks that are under way; otherwise they make the answer 409."`
}

// DAXResizeRequest is the body of POST /reconfigure/dax/resize.
type DAXResizeRequest struct {
	DAXTarget
	Size  DAXSize `json:"size" doc:"How much of the device to use from now on: bytes, or a size such as \"100GiB\" (powers of 1024)."`
	Mode  string  `json:"mode,omitempty" enum:"migrate,evict" default:"migrate" doc:"What becomes of chunks that lie beyond the new size."`
	Force bool    `json:"force,omitempty" doc:"Wait for loads of these chunks that are under way; otherwise they make the answer 409."`
}

// DAXSlots counts the slots of a device.
type DAXSlots struct {
	Free     int64 `json:"free" doc:"That may be written to."`
	Used     int64 `json:"used" doc:"That have a chunk, or are being written."`
	Leased   int64 `json:"leased" doc:"Of the used ones, those being read or written now."`
	Draining int64 `json:"draining" doc:"Of the used ones, those in parts of the device that nothing new is written to."`
}

// DAXProgress is the progress of the last migration from a device.
type DAXProgress struct {
	Moved int64 `json:"moved" doc:"Chunks that have been moved."`
	Total int64 `json:"total" doc:"Chunks that were to be, when the last migration began."`
}

// DAXDeviceStatus describes one device. Fields without a description repeat others under LMCache's
// names.
type DAXDeviceStatus struct {
	Index         int         `json:"index" doc:"In its tier, from 0."`
	AdapterIndex  int         `json:"adapter_index" doc:"The tier's number, from 0."`
	DevicePath    string      `json:"device_path" doc:"The device."`
	State         string      `json:"state" doc:"active, draining, migrating or removing."`
	SizeBytes     int64       `json:"size_bytes" doc:"What this sidecar has of the device."`
	CapacityBytes int64       `json:"capacity_bytes" doc:"Of this, what is for chunks."`
	UsedBytes     int64       `json:"used_bytes" doc:"Of this, what chunks take."`
	Slots         DAXSlots    `json:"slots" doc:"The slots for chunks, as far as they have been cut."`
	Progress      DAXProgress `json:"progress" doc:"How far the last migration from it is."`

	MaxDAXSizeBytes   int64 `json:"max_dax_size_bytes"`
	MaxSlots          int64 `json:"max_slots"`
	LiveSlotCount     int64 `json:"live_slot_count"`
	LockedKeyCount    int64 `json:"locked_key_count"`
	BorrowedSlotCount int64 `json:"borrowed_slot_count"`
	RestartRecovery   bool  `json:"supports_restart_recovery"`
}

// DAXTierStatus describes one tier of devices.
type DAXTierStatus struct {
	HotPlugEnabled     bool              `json:"hotplug_enabled" doc:"Whether devices may be added, removed and resized: hotplug of the tier's settings."`
	TotalCapacityBytes int64             `json:"total_capacity_bytes" doc:"Of all devices."`
	TotalUsedBytes     int64             `json:"total_used_bytes" doc:"Of all devices."`
	Devices            []DAXDeviceStatus `json:"devices" doc:"In the order in which they came."`
}

// DAXAdapterStatus describes one tier of devices in the form of an adapter of LMCache.
type DAXAdapterStatus struct {
	AdapterIndex        int           `json:"adapter_index" doc:"From 0, in the order of the tiers."`
	Backend             string        `json:"backend" doc:"dax."`
	Tier                string        `json:"tier" doc:"The tier's name."`
	SupportedOperations []string      `json:"supported_operations" doc:"What it can be asked to do."`
	Status              DAXTierStatus `json:"status" doc:"Its devices."`
}

// DAXStatus is the response of GET /reconfigure/dax/status.
type DAXStatus struct {
	Enabled     bool               `json:"enabled" doc:"Whether there is a tier of DAX devices."`
	Backend     string             `json:"backend" doc:"dax."`
	NumAdapters int                `json:"num_adapters" doc:"Tiers of DAX devices."`
	Adapters    []DAXAdapterStatus `json:"adapters" doc:"These tiers, nearest first."`
	DAXTierStatus
}

// DAXResult is the response to a change that succeeded.
type DAXResult struct {
	Status           string           `json:"status" doc:"ok."`
	Operation        string           `json:"operation" doc:"add, remove, drain or resize."`
	AdapterIndex     int              `json:"adapter_index" doc:"The tier's number."`
	DevicePath       string           `json:"device_path" doc:"The device."`
	Index            int              `json:"index" doc:"The device's number in its tier, before the change if it was removed."`
	State            string           `json:"state" doc:"Its state now; removed if it is no part of the tier any more."`
	Device           *DAXDeviceStatus `json:"device,omitempty" doc:"The device, if it is still there."`
	MovedKeys        *int64           `json:"moved_keys,omitempty" doc:"Chunks that it had when they began to be moved away."`
	MovedBytes       *int64           `json:"moved_bytes,omitempty" doc:"Their bytes."`
	DeletedKeys      *int64           `json:"deleted_keys,omitempty" doc:"Chunks that it had when they began to be dropped."`
	SourceSlotsFreed *int64           `json:"source_slots_freed,omitempty" doc:"Slots that had them."`
	OldSizeBytes     *int64           `json:"old_size_bytes,omitempty" doc:"What was used of it before."`
	NewSizeBytes     *int64           `json:"new_size_bytes,omitempty" doc:"What was asked for."`
	Seconds          float64          `json:"seconds" doc:"How long it took."`
}

// changes holds the reconfigurations under way. They use tiers, so they end before the tiers are
// closed.
type changes struct {
	mu     sync.Mutex
	closed bool // guarded by mu, as are additions to wg
	wg     sync.WaitGroup
}

// begin counts a change and binds it to the daemon's life. The caller must call end.
func (o *Operations) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	if err := o.ready(); err != nil {
		return nil, nil, apiError(http.StatusServiceUnavailable, "ask this sidecar's successor",
			"%v", err)
	}
	o.changes.mu.Lock()
	defer o.changes.mu.Unlock()
	if o.changes.closed {
		return nil, nil, tiers.ErrClosed
	}
	o.changes.wg.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(o.Background, func() { cancel(tiers.ErrClosed) })
	return ctx, func() {
		stop()
		cancel(nil)
		o.changes.wg.Done()
	}, nil
}

func daxSlots(dev *daxtier.DeviceStatus) DAXSlots {
	return DAXSlots{Free: int64(dev.Slots.Free), Used: int64(dev.Slots.Used),
		Leased: int64(dev.Slots.Leased), Draining: int64(dev.Slots.Draining)}
}

// describe describes an adapter. index is its number.
func (a *Adapter) describe(index int) DAXAdapterStatus {
	st := a.Status()
	out := DAXAdapterStatus{
		AdapterIndex: index, Backend: "dax", Tier: a.Tier, SupportedOperations: []string{"status",
			"add", "remove", "resize"},
		Status: DAXTierStatus{HotPlugEnabled: a.HotPlug, TotalCapacityBytes: st.TotalCapacityBytes,
			TotalUsedBytes: st.TotalUsedBytes, Devices: []DAXDeviceStatus{}},
	}
	for i, dev := range st.Devices {
		slots := daxSlots(&dev)
		out.Status.Devices = append(out.Status.Devices, DAXDeviceStatus{
			Index: i, AdapterIndex: index, DevicePath: dev.Path, State: string(dev.State),
			SizeBytes: dev.SizeBytes, CapacityBytes: dev.CapacityBytes, UsedBytes: dev.UsedBytes,
			Slots:           slots,
			Progress:        DAXProgress{Moved: dev.Moved, Total: dev.Total},
			MaxDAXSizeBytes: dev.SizeBytes, MaxSlots: slots.Free + slots.Used,
			LiveSlotCount: slots.Used, LockedKeyCount: slots.Leased, RestartRecovery: true,
		})
	}
	return out
}

// device returns a device of an adapter, or nil.
func (s *DAXTierStatus) device(path string) *DAXDeviceStatus {
	path = filepath.Clean(path)
	if i := slices.IndexFunc(s.Devices,
		func(d DAXDeviceStatus) bool { return filepath.Clean(d.DevicePath) == path }); i >= 0 {
		return &s.Devices[i]
	}
	return nil
}

// DAXStatus describes the tiers of DAX devices.
func (o *Operations) DAXStatus() DAXStatus {
	out := DAXStatus{
		Enabled: len(o.Adapters) > 0, Backend: "dax", NumAdapters: len(o.Adapters),
		Adapters: []DAXAdapterStatus{}, DAXTierStatus: DAXTierStatus{Devices: []DAXDeviceStatus{}},
	}
	for i := range o.Adapters {
		a := o.Adapters[i].describe(i)
		out.Adapters = append(out.Adapters, a)
		out.HotPlugEnabled = out.HotPlugEnabled || a.Status.HotPlugEnabled
		out.TotalCapacityBytes += a.Status.TotalCapacityBytes
		out.TotalUsedBytes += a.Status.TotalUsedBytes
		out.Devices = append(out.Devices, a.Status.Devices...)
	}
	return out
}

// seeDAXStatus is the fix for an unknown device or tier.
const seeDAXStatus = "GET /reconfigure/dax/status lists the tiers of DAX devices, and their devices"

// checkDevicePath refuses a path that is not absolute.
func checkDevicePath(path string) error {
	if !filepath.IsAbs(path) {
		return apiError(http.StatusBadRequest,
			"name a device by its path from the root, such as /dev/dax0.0",
			"device_path: %q is not an absolute path", path)
	}
	return nil
}

// target returns the adapter that a request names, and its number.
func (o *Operations) target(r DAXTarget) (int, *Adapter, error) {
	if err := checkDevicePath(r.DevicePath); err != nil {
		return 0, nil, err
	}
	if len(o.Adapters) == 0 {
		return 0, nil, apiError(http.StatusNotFound,
			"add a tier of kind dax to the settings; with hotplug: true it may have no devices at first", "there is no tier of DAX devices")
	}
	i := 0
	if r.AdapterIndex != nil {
		if i = *r.AdapterIndex; i < 0 || i >= len(o.Adapters) {
			return 0, nil, apiError(http.StatusNotFound, seeDAXStatus,
				"adapter_index: there is no %d: there are %d tiers of DAX devices, from 0 on", i,
				len(o.Adapters))
		}
	} else {
		for k := range o.Adapters {
			if st := o.Adapters[k].describe(k); st.Status.device(r.DevicePath) != nil {
				i = k
			}
		}
	}
	a := &o.Adapters[i]
	if !a.HotPlug {
		return 0, nil, apiError(http.StatusForbidden,
			"set hotplug: true for it in the settings, and restart the sidecar",
			"tier %q does not allow its devices to be changed while it serves", a.Tier)
	}
	return i, a, nil
}

// DAXAdd adds a device. Like LMCache, it leaves a device of that size unchanged if it is already
// there.
func (o *Operations) DAXAdd(ctx context.Context, r DAXAddRequest) (DAXResult, error) {
	start := time.Now()
	i, a, err := o.target(r.DAXTarget)
	if err != nil {
		return DAXResult{}, err
	}
	size, err := r.Size.bytes()
	if err != nil {
		return DAXResult{}, err
	}
	err = a.Add(ctx, r.DevicePath, size)
	if errors.Is(err, daxtier.ErrExists) {
		st := a.describe(i)
		if dev := st.Status.device(r.DevicePath); dev != nil && dev.State == "active" &&
			dev.SizeBytes == size/int64(max(a.Ranks, 1)) {
			return o.daxResult("add", i, r.DevicePath, nil, start), nil
		}
	}
	if err != nil {
		return DAXResult{}, daxError(ctx, ofTier, r.DevicePath, err)
	}
	out := o.daxResult("add", i, r.DevicePath, nil, start)
	o.Log.Info("DAX device added: put it into the settings if it is to be there after a restart",
		zap.String("tier", a.Tier), zap.String("device", r.DevicePath),
		zap.String("size", bytesize.Format(size)))
	return out, nil
}

// DAXRemove removes a device, or starts to drain it.
func (o *Operations) DAXRemove(ctx context.Context, r DAXRemoveRequest) (DAXResult, error) {
	start := time.Now()
	i, a, err := o.target(r.DAXTarget)
	if err != nil {
		return DAXResult{}, err
	}
	st := a.describe(i)
	before := st.Status.device(r.DevicePath)
	if err := a.Remove(ctx, r.DevicePath, daxtier.Mode(r.Mode), r.Force); err != nil {
		return DAXResult{}, daxError(ctx, ofTier, r.DevicePath, err)
	}
	operation := "remove"
	if r.Mode == string(daxtier.Drain) {
		operation = "drain"
	}
	out := o.daxResult(operation, i, r.DevicePath, before, start)
	if before != nil && r.Mode != string(daxtier.Drain) {
		none := int64(0)
		out.MovedKeys, out.MovedBytes, out.DeletedKeys, out.SourceSlotsFreed = &before.Slots.Used,
			&before.UsedBytes, &none, &before.Slots.Used
		if r.Mode == string(daxtier.Evict) {
			out.MovedKeys, out.MovedBytes, out.DeletedKeys = &none, &none, &before.Slots.Used
		}
	}
	o.Log.Info("DAX device "+map[bool]string{true: "is drained",
		false: "removed: take it out of the settings too"}[r.Mode == string(daxtier.Drain)],
		zap.String("tier", a.Tier), zap.String("device", r.DevicePath), zap.String("mode", r.Mode),
		zap.Duration("took", time.Since(start)))
	return out, nil
}

// DAXResize changes how much of a device is used.
func (o *Operations) DAXResize(ctx context.Context, r DAXResizeRequest) (DAXResult, error) {
	start := time.Now()
	i, a, err := o.target(r.DAXTarget)
	if err != nil {
		return DAXResult{}, err
	}
	size, err := r.Size.bytes()
	if err != nil {
		return DAXResult{}, err
	}
	st := a.describe(i)
	before := st.Status.device(r.DevicePath)
	if err := a.Resize(ctx, r.DevicePath, size, daxtier.Mode(r.Mode), r.Force); err != nil {
		return DAXResult{}, daxError(ctx, ofTier, r.DevicePath, err)
	}
	out := o.daxResult("resize", i, r.DevicePath, before, start)
	if out.NewSizeBytes = &size; before != nil {
		out.OldSizeBytes = &before.SizeBytes
	}
	o.Log.Info("DAX device resized: change it in the settings too", zap.String("tier", a.Tier),
		zap.String("device", r.DevicePath), zap.String("size", bytesize.Format(size)),
		zap.Duration("took", time.Since(start)))
	return out, nil
}

// daxResult describes the result of a change. before is the device before the change, if it was
// there.
func (o *Operations) daxResult(operation string, adapter int, path string, before *DAXDeviceStatus,
	start time.Time) DAXResult {
	out := DAXResult{Status: "ok", Operation: operation, AdapterIndex: adapter, DevicePath: path,
		State: "removed", Seconds: time.Since(start).Seconds()}
	if before != nil {
		out.Index, out.DevicePath = before.Index, before.DevicePath
	}
	st := o.Adapters[adapter].describe(adapter)
	if now := st.Status.device(path); now != nil {
		out.Index, out.DevicePath, out.State, out.Device = now.Index, now.DevicePath, now.State, now
	}
	return out
}

// A daxOwner has the fixes for errors about devices of a tier or of the arena: how to list them,
// what to do about leases, and which settings make the partition.
type daxOwner struct{ list, leased, partition string }

var (
	ofTier = daxOwner{
		seeDAXStatus, "try again when these loads have ended, or set force: then they are waited for", "offset and size, or rank and ranks",
	}
	ofArena = daxOwner{
		"GET /reconfigure/dax/l1/status lists the devices of the arena",
		"try again when the lookups, loads and stores that have leases on it have ended, and unpin what is pinned there (GET /v1/pins); set force: then they are waited for; or set mode to drain, which waits in the background",
		"arena.dax.offset and a size, or arena.dax.rank and arena.dax.ranks",
	}
)

// daxError gives an error of a pool a status and a fix.
func daxError(ctx context.Context, of daxOwner, path string, err error) error {
	switch {
	case errors.Is(err, daxtier.ErrNotFound):
		return apiError(http.StatusNotFound, of.list, "%v", err)
	case errors.Is(err, daxtier.ErrExists):
		return apiError(http.StatusConflict, "resize it if it is to have another size; "+of.list,
			"%v", err)
	case errors.Is(err, dax.ErrBusy):
		return apiError(http.StatusConflict, "end that process, or give it a part of its own: "+
			of.partition, "%v", err)
	case errors.Is(err, daxtier.ErrLeased):
		return apiError(http.StatusConflict, of.leased, "%v", err)
	case errors.Is(err, dax.ErrNoSpace), errors.Is(err, dax.ErrNoMemory):
		return apiError(http.StatusInsufficientStorage,
			"ask for less, or make room for the file that stands in for a device", "%v", err)
	case errors.Is(err, daxtier.ErrNoRoom):
		return apiError(http.StatusInsufficientStorage,
			"add a device first, make another one larger, or set mode to evict: then its chunks are dropped", "%v", err)
	case errors.Is(err, daxtier.ErrForeign):
		return apiError(http.StatusBadRequest,
			"name another file, or clear its first page if what is in it is not needed", "%v", err)
	case errors.Is(err, daxtier.ErrDevice):
		return apiError(http.StatusBadRequest,
			"see that the device is there, that this user may read and write it, and that its size and alignment fit", "%v", err)
	case errors.Is(err, tiers.ErrInvalid):
		return apiError(http.StatusBadRequest, seeDocument, "%v", err)
	case errors.Is(context.Cause(ctx), tiers.ErrClosed), errors.Is(err, tiers.ErrClosed):
		return apiError(http.StatusServiceUnavailable,
			"ask this sidecar's successor; what was moved is moved, and the rest is where it was",
			"%s: the sidecar is ending", path)
	case ctx.Err() != nil:
		return apiError(http.StatusServiceUnavailable,
			"ask again to go on; what was moved is moved, and the rest is where it was",
			"%s: it was stopped: %v", path, err)
	case errors.Is(err, tiers.ErrBusy):
		return apiError(http.StatusServiceUnavailable,
			"try again when it has ended; a device that is drained is taken into use again by adding it", "%v", err)
	}
	return err // operationError handles the rest
}

// registerDAX adds the routes for hot plug, under the paths of older and newer versions of LMCache.
func (a *api) registerDAX() {
	for _, at := range []struct{ path, id string }{{"/reconfigure/dax/", "dax-"},
		{"/reconfigure/dax/l2/", "dax-l2-"}} {
		huma.Register(a, a.get(at.path+"status", at.id+"status",
			"The DAX devices of the tiers, and what is under way on them"),
			func(context.Context, *struct{}) (*output[DAXStatus], error) {
				return &output[DAXStatus]{a.o.DAXStatus()}, nil
			})
		registerChange(a, a.post(at.path+"add", at.id+"add",
			"Add a DAX device to a tier that serves"), a.o.DAXAdd)
		registerChange(a, a.post(at.path+"remove", at.id+"remove",
			"Remove a DAX device from a tier that serves, or have it drained"), a.o.DAXRemove)
		registerChange(a, a.post(at.path+"resize", at.id+"resize",
			"Use more or less of a DAX device of a tier that serves"), a.o.DAXResize)
	}
	a.registerDAXArena()
}

// registerChange adds the route of a change of devices. A change has no deadline. It ends early
// when its client leaves or the sidecar ends.
func registerChange[In, Out any](a *api, op huma.Operation,
	do func(context.Context, In) (Out, error)) {
	huma.Register(a, op, func(ctx context.Context, in *input[In]) (*output[Out], error) {
		if rc, ok := ctx.Value(controllerKey{}).(*http.ResponseController); ok {
			if err := errors.Join(rc.SetReadDeadline(time.Time{}),
				rc.SetWriteDeadline(time.Time{})); err != nil {
				return nil, err
			}
		}
		ctx, end, err := a.o.begin(ctx)
		if err != nil {
			return nil, operationError(err)
		}
		defer end()
		out, err := do(ctx, in.Body)
		if err != nil {
			return nil, operationError(err)
		}
		return &output[Out]{out}, nil
	})
}

// WriteTable writes the devices for people.
func (s DAXStatus) WriteTable(w io.Writer) error {
	if len(s.Adapters) == 0 {
		_, err := fmt.Fprintln(w,
			"no tier of DAX devices (see --dax of lookaside serve); those of an arena on DAX: lookaside dax status --arena")
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "TIER\tDEVICE\tSTATE\tUSED\tSLOTS\tFREE\tLEASED\tDRAINING\tPROGRESS")
	for _, a := range s.Adapters {
		for _, dev := range a.Status.Devices {
			progress := "-"
			if dev.Progress.Total > 0 {
				progress = fmt.Sprintf("%d of %d", dev.Progress.Moved, dev.Progress.Total)
			}
			fmt.Fprintf(tw, "%s\t%s\t%s\t%s of %s\t%d\t%d\t%d\t%d\t%s\n", a.Tier, dev.DevicePath,
				dev.State, bytesize.Format(dev.UsedBytes), bytesize.Format(dev.CapacityBytes),
				dev.Slots.Used, dev.Slots.Free, dev.Slots.Leased, dev.Slots.Draining, progress)
		}
		fmt.Fprintf(tw, "%s\t\t%s\t%s of %s\n", a.Tier, map[bool]string{true: "hot plug",
			false: "fixed"}[a.Status.HotPlugEnabled],
			bytesize.Format(a.Status.TotalUsedBytes), bytesize.Format(a.Status.TotalCapacityBytes))
	}
	return tw.Flush()
}
