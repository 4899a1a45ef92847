package policy

import (
	"fmt"
	"strings"
)

// Default is the policy of a store that names none. On every trace that was tried it keeps at most
// a hundredth less than the best policy for that trace.
const Default = "adaptive"

// Options are the options of all policies.
type Options struct {
	// Seed makes the hash functions of sketches and samples hard to predict. The same seed and
	// calls give the same victims.
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

// Names returns the names of all policies.
func Names() []string {
	names := make([]string, len(makers))
	for i, m := range makers {
		names[i] = m.name
	}
	return names
}

// New returns a policy without slots. The name "" means Default.
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
