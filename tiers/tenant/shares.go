package tenant

import (
	"fmt"
	"math"
)

// Shares says how a store is divided among tenants. A share is what a tenant keeps however much
// others store. What it does not use is lent.
type Shares struct {
	// Named are tenants' parts of the store, by name. Their sum is at most 1.
	Named map[string]float64
	// Default is the most that each tenant without a named share has. All of these that hold
	// something divide equally what Named leaves. 0: as much as that gives, or with no named share
	// that the store is not divided at all.
	Default float64
}

// On reports whether the store is divided.
func (s *Shares) On() bool { return len(s.Named) > 0 || s.Default > 0 }

// Validate returns an error if the shares cannot be had.
func (s *Shares) Validate() error {
	sum := 0.0
	for name, part := range s.Named {
		if !(part > 0 && part <= 1) {
			return fmt.Errorf("the share of tenant %q is %v %%, want more than 0, at most 100 %%",
				name, percent(part))
		}
		sum += part
	}
	if sum > 1+1e-9 {
		return fmt.Errorf("the shares add up to %v %%, at most 100 %%", percent(sum))
	}
	if !(s.Default >= 0 && s.Default <= 1) {
		return fmt.Errorf("the default share is %v %%, want 0 to 100 %%", percent(s.Default))
	}
	return nil
}

func percent(part float64) float64 { return math.Round(part*1e4) / 1e2 }

// Table is Shares by ID.
type Table struct {
	on    bool
	named [MaxIDs]float64 // 0: it has no named share
	rest  float64         // what these leave
	most  float64         // of each of the others
}

// Table returns the shares by ID. r must list all names.
func (s *Shares) Table(r *Registry) (Table, error) {
	if err := s.Validate(); err != nil {
		return Table{}, err
	}
	t := Table{on: s.On(), rest: 1, most: s.Default}
	if t.most == 0 {
		t.most = 1
	}
	for name, part := range s.Named {
		id, ok := ID(0), false
		if r != nil {
			r.mu.RLock()
			id, ok = r.ids[name]
			ok = ok && r.all[id].listed
			r.mu.RUnlock()
		}
		if !ok {
			return Table{}, fmt.Errorf("tenant %q has a share and is not listed", name)
		}
		t.named[id] = part
		t.rest -= part
	}
	t.rest = max(t.rest, 0)
	return t, nil
}

// On reports whether the store is divided.
func (t *Table) On() bool { return t.on }

// Named reports whether a tenant has a named share.
func (t *Table) Named(id ID) bool { return t.named[id] > 0 }

// Part returns the part of the store that is a tenant's. others is how many tenants without a named
// share divide what the named ones leave.
func (t *Table) Part(id ID, others int) float64 {
	if part := t.named[id]; part > 0 {
		return part
	}
	return min(t.most, t.rest/float64(max(others, 1)))
}
