package sidecar

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/connector"
	"lookaside/internal/bytesize"
	"lookaside/ipc/wire"
	"lookaside/sidecar/settings"
	"lookaside/tiers"
	"lookaside/tiers/daxtier"
	"lookaside/tiers/remote"
	"lookaside/tiers/stack"
	"lookaside/tiers/tenant"
	"lookaside/tiers/vfs"
	"lookaside/tiers/why"
)

// openTiers opens the tiers of the settings, nearest first. After an error none is open. claim
// makes a claim on the arena for a program that is a tier.
func openTiers(cfg settings.Config, tenants *tenant.Registry, gone *why.Memory,
	claim func() (fd int, err error), log *zap.Logger) (open []stack.TierConfig, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, closeTiers(open))
			open = nil
		}
	}()
	for i := range cfg.Tiers {
		c := &cfg.Tiers[i]
		t, err := openTier(c, tenantry{tenants, cfg.Tenants.TierShares(), gone,
			uint8(i + 1)}, claim, log.Named(c.Name))
		if err != nil {
			return open, fmt.Errorf("%s tier %q: %w", c.Kind, c.Name, err)
		}
		sc := stack.TierConfig{
			Name: c.Name, Tier: t, Admit: c.Admit, Queue: c.Queue, LookupTimeout: c.LookupTimeout,
			LoadTimeout: c.LoadTimeout, StoreTimeout: c.StoreTimeout,
		}
		if !c.Local() { // local tiers have workers of their own
			sc.LookupWorkers, sc.LoadWorkers, sc.StoreWorkers = c.Workers, c.Workers, c.Workers
		}
		open = append(open, sc)
	}
	return open, nil
}

// tenantry is the tenants of a store, how it is divided among them, and where it notes what it
// drops, as which tier.
type tenantry struct {
	registry *tenant.Registry
	shares   tenant.Shares
	gone     *why.Memory
	tier     uint8
}

func openTier(c *settings.TierConfig, who tenantry, claim func() (fd int, err error),
	log *zap.Logger) (tiers.Tier, error) {
	switch c.Kind {
	case settings.TierDAX:
		o := daxOptions(&c.DAX, log)
		o.Tenants, o.Shares = who.registry, who.shares
		o.Gone, o.GoneTier = who.gone, who.tier
		return daxTier(daxtier.Open(o))
	case settings.TierDisk:
		return openDisk(c, who, log)
	case settings.TierProgram:
		return programTier(remote.OpenProgram(programOptions(c, claim, log)))
	case settings.TierRedis:
		return remoteTier(remote.OpenRedis(c.Redis))
	default:
		return remoteTier(remote.OpenS3(c.S3))
	}
}

// daxOptions returns the options of a DAX pool.
func daxOptions(c *settings.DAXConfig, log *zap.Logger) daxtier.Options {
	o := daxtier.Options{
		OffsetBytes: c.Offset, Rank: c.Rank, Ranks: c.Ranks, AllowFiles: c.AllowFiles,
		SlabBytes: c.Slab, Policy: c.Eviction, HotPlug: c.HotPlug, Seed: connector.RandomID(),
		Log: log,
	}
	for _, d := range c.Devices {
		size := d.Size
		if size == 0 {
			size = c.Size
		}
		o.Devices = append(o.Devices, daxtier.DeviceSpec{Path: d.Path, SizeBytes: size})
	}
	return o
}

// daxTier returns p as a Tier, or a nil Tier and err.
func daxTier(p *daxtier.Pool, err error) (tiers.Tier, error) {
	if err != nil {
		return nil, err
	}
	return p, nil
}

// remoteTier returns t as a Tier, or a nil Tier and err.
func remoteTier(t *remote.Tier, err error) (tiers.Tier, error) {
	if err != nil {
		return nil, err
	}
	return t, nil
}

// checkable is a tier that can be out of reach.
type checkable interface {
	tiers.Tier
	Check(ctx context.Context) error
}

// checkPatience is how long a server may take to respond to the check.
const checkPatience = 5 * time.Second

// checkTiers logs which servers cannot be reached. The start does not wait for it: a sidecar serves
// without them, and package stack detects failures by itself.
func checkTiers(ctx context.Context, open []stack.TierConfig, log *zap.Logger) {
	var wg sync.WaitGroup
	for _, t := range open {
		server, ok := t.Tier.(checkable)
		if !ok {
			continue
		}
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, checkPatience)
			defer cancel()
			log := log.With(zap.String("tier", t.Name), zap.String("at", server.Stats().Detail))
			switch err := server.Check(ctx); {
			case err == nil:
				log.Info("tier is there")
			case ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled):
			default:
				log.Warn("tier cannot be used now; serving without it until it can", zap.Error(err))
			}
		})
	}
	wg.Wait()
}

// lossyFields returns the space fields that separate sidecars whose tiers change the bytes they
// keep.
func lossyFields(list []settings.TierConfig) []wire.Field {
	var codecs []string
	for i := range list {
		if name := list[i].Lossy(); name != "" {
			codecs = append(codecs, name)
		}
	}
	if len(codecs) == 0 {
		return nil
	}
	slices.Sort(codecs)
	return []wire.Field{{Key: "remote_serde", Value: strings.Join(slices.Compact(codecs), "+")}}
}

// closeTiers closes tiers, the lowest first.
func closeTiers(open []stack.TierConfig) error {
	var errs []error
	for _, t := range slices.Backward(open) {
		if err := t.Tier.Close(); err != nil {
			errs = append(errs, fmt.Errorf("tier %q: %w", t.Name, err))
		}
	}
	return errors.Join(errs...)
}

// checkRoom refuses a capacity that the file systems do not have. It runs before any space is
// taken, because a failed attempt would leave the file systems full.
func checkRoom(c settings.DiskConfig) error {
	type fileSystem struct {
		dirs       []string
		want, free int64
	}
	byDevice := map[uint64]*fileSystem{}
	var order []uint64
	for _, dir := range c.Paths {
		at := dir
		var st unix.Stat_t
		for {
			err := unix.Stat(at, &st)
			if err == nil {
				break
			}
			if !errors.Is(err, unix.ENOENT) || at == filepath.Dir(at) {
				return fmt.Errorf("paths: %s: %w", at, err)
			}
			at = filepath.Dir(at) // the directory will be made
		}
		fs := byDevice[st.Dev]
		if fs == nil {
			free, err := vfs.OS.FreeSpace(at)
			if err != nil {
				return fmt.Errorf("paths: %s: %w", at, err)
			}
			fs = &fileSystem{free: free}
			byDevice[st.Dev] = fs
			order = append(order, st.Dev)
		}
		fs.dirs = append(fs.dirs, dir)
		fs.want += c.Capacity / int64(len(c.Paths))
		// Space that the store has already taken counts as available.
		slabs, err := filepath.Glob(filepath.Join(dir, "slab-*"))
		if err != nil {
			return err
		}
		for _, name := range slabs {
			if info, err := vfs.OS.Stat(name); err == nil {
				fs.free += info.Allocated
			}
		}
	}
	for _, dev := range order {
		if fs := byDevice[dev]; fs.want > fs.free {
			return fmt.Errorf("capacity: %s are wanted in %s, and %s are free there: set a smaller capacity, or other paths",
				bytesize.Format(fs.want), strings.Join(fs.dirs, ", "), bytesize.Format(fs.free))
		}
	}
	return nil
}
