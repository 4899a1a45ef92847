package policy

import (
	"fmt"
	"strings"
)

// Default is the policy of a store that names none: no other keeps more of any trace that was
// tried, but for a hundredth here and there.
const Default = "adaptive"

// Options are what all policies can be given.
type Options struct {
	// Seed makes the hash functions of sketches and samples hard to foresee. The same seed and
	// calls make the same victims.
	Seed uint64
}

var makers = []struct {
	name string
	make func(Options) Policy
}{
	{"lru", newLRU},
	{"s3fifo", newS3FIFO},
	{"sieve", newSIEVE},
	{"arc", newARC},
	{"wtinylfu", newWTinyLFU},
	{"adaptive", newAdaptive},
}

// Names lists the policies that there are.
func Names() []string {
	names := make([]string, len(makers))
	for i, m := range makers {
		names[i] = m.name
	}
	return names
}

// New makes a policy with no slots. "" is the default one.
func New(name string, o Options) (Policy, error) {
	if name == "" {
		name = Default
	}
	for _, m := range makers {
		if m.name == name {
			return m.make(o), nil
		}
	}
	return nil, fmt.Errorf("no eviction policy %q: there are %s", name, strings.Join(Names(), ", "))
}
