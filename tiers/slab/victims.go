package slab

import (
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// The chunks that a disk drops next are those that its engine would write to a tier below it. The
// engine calls that a cascade.

// NextVictims implements tiers.Victims.
func (d *Disk) NextVictims(max int, out []tiers.Victim) []tiers.Victim {
	d.calls.RLock()
	defer d.calls.RUnlock()
	if d.closed {
		return out
	}
	items, _ := d.engine.NextCascades(0, max, nil, nil)
	for _, c := range items {
		sp := d.spaceByID(c.Space)
		if sp == nil {
			d.engine.EndCascade(c.Handle, false)
			continue
		}
		out = append(out, tiers.Victim{Handle: c.Handle, Run: tiers.Run{Space: sp, First: c.First,
			Prev: c.Prev, Hashes: c.Hashes, Tenant: c.Tenant}})
	}
	return out
}

// EndVictim implements tiers.Victims.
func (d *Disk) EndVictim(handle uint64, ok bool) { d.engine.EndCascade(handle, ok) }

// VictimsReady implements tiers.Victims.
func (d *Disk) VictimsReady() <-chan struct{} { return d.victims }

// wakeVictims is called by the engine, under its lock, when it will need room.
func (d *Disk) wakeVictims(engine.Work) {
	select {
	case d.victims <- struct{}{}:
	default:
	}
}
