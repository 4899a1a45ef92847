package sidecar

import (
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"lookaside/connector"
	"lookaside/tiers"
	"lookaside/tiers/disk"
	"lookaside/tiers/stack"
)

// openTiers opens the tiers of the settings, nearest first. After an error none is open.
func openTiers(cfg Config, log *zap.Logger) (open []stack.TierConfig, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, closeTiers(open))
			open = nil
		}
	}()
	for i := range cfg.Tiers {
		c := &cfg.Tiers[i]
		t, err := openTier(c, log.Named(c.Name))
		if err != nil {
			return open, fmt.Errorf("%s tier %q: %w", c.Kind, c.Name, err)
		}
		sc := stack.TierConfig{
			Name: c.Name, Tier: t, Admit: c.Admit, Queue: c.Queue, LoadTimeout: c.LoadTimeout, StoreTimeout: c.StoreTimeout,
		}
		if c.Kind != tierDisk { // which has workers of its own
			sc.LookupWorkers, sc.LoadWorkers, sc.StoreWorkers = c.Workers, c.Workers, c.Workers
		}
		open = append(open, sc)
	}
	return open, nil
}

func openTier(c *TierConfig, log *zap.Logger) (tiers.Tier, error) {
	switch c.Kind {
	case tierDisk:
		return disk.Open(disk.Options{
			Dirs: c.Disk.Paths, CapacityBytes: c.Disk.Capacity, SlabBytes: c.Disk.Slab, Policy: c.Disk.Eviction, Workers: c.Workers,
			Direct: disk.Direct(c.Disk.Direct), Seed: connector.RandomID(), Log: log,
		})
	}
	return nil, fmt.Errorf("%w: no such kind of tier", tiers.ErrInvalid)
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
